"""Generate docs/reference/trainer.md: all that a user gives to a Trainer, calls, defines or overrides."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from class_pages import markdown

import torchhal
from torchhal import Callback, DataModule, Module, Trainer
from torchhal.module import ModuleHooks
from torchhal.registry._hints import _ARGUMENTS, ATTRIBUTES, NAMES
from torchhal.trainer import callbacks, loggers

ABOUT = """\
All that a user gives to a Trainer, calls, defines or overrides. [Train](../how-to/train.md) shows it in use. The names
that Lightning, Accelerate, the Hugging Face Trainer and Keras have for it are [at the end](#names-of-other-trainers);
[Migrate](../how-to/migrate.md) has whole programs side by side.
"""

STEPS = {
    "training_step(batch, batch_idx)": "Returns the loss (a 0-d tensor), a dict with the key `loss`, or None to skip "
    "the batch. Required for `fit`.",
    "configure_optimizers()": "Returns an optimizer, a list of them, a pair of lists (optimizers, schedulers), a dict "
    "with `optimizer` and `lr_scheduler`, or None. Required for `fit`.",
    "validation_step(batch, batch_idx, dataloader_idx=0)": "Called for each validation batch, without gradients, in "
    "evaluation mode.",
    "test_step(batch, batch_idx, dataloader_idx=0)": "The same for each test batch.",
    "predict_step(batch, batch_idx, dataloader_idx=0)": "Returns what `trainer.predict` collects.",
    "train_dataloader()": "Returns the training loader, where `fit` is given none; also `val_dataloader`, "
    "`test_dataloader` and `predict_dataloader`, which may return several.",
}
"""What a model defines itself, without an inherited method -> what it does."""

STATE = {
    "should_stop": "Set it to True to end the fit at the next step, once `min_epochs` and `min_steps` are reached.",
    "log_dir": "The folder of the run, with its logs and checkpoints; None where nothing is kept.",
    "run_id": "Identifies this run, and those that continue it in its folder.",
    "ckpt_path": "The checkpoint that this call continues from or evaluates; None without one.",
    "strategy": "The strategy in use, which has the model, the optimizers and the devices.",
    "plan": "What the arguments were resolved to, with a reason for each choice: `print(trainer.plan.describe())`.",
    "datamodule": "The data module of this call; None without one.",
    "loggers": "The loggers in use, a list.",
    "callbacks": "The callbacks in use, the default ones too, a list.",
}
"""Attribute of a Trainer that is no property of its own -> what it is."""

FOR_STRATEGIES = ("announce", "configure_optimizers", "print_results", "warn_once")
"""Methods of the Trainer that its own parts call."""


def text(made: str) -> str:
    """Return the page; ``made`` is the comment that says by what it was made."""
    parts = [
        "# The Trainer, modules, callbacks and loggers\n", f"{made}\n", ABOUT,
        "## Arguments of the Trainer\n", "All are given by name.\n", *arguments(Trainer),
        "\n## Methods of the Trainer\n", *sections(Trainer, leave_out=FOR_STRATEGIES),
        "## Attributes of the Trainer\n", "An argument is an attribute, too, of the same name.\n",
        *attributes(Trainer, STATE),
        "\n## What a model defines\n",
        "Any `nn.Module` with the first two trains; `torchhal.Module` adds what follows.\n", *table("method", STEPS),
        "\n## Methods of a Module\n", *sections(Module, leave_out=vars(ModuleHooks)),
        "## Attributes of a Module\n", *attributes(Module),
        "\n## Hooks\n",
        "Methods of a `torchhal.Module`, of a `torchhal.Callback`, or of both, called on every rank. A callback's get\n"
        "the Trainer and the module before the arguments shown: `on_fit_start(self, trainer, module)`.\n",
        *hooks(),
        "\n## DataModule\n", f"{markdown(DataModule.__doc__ or '')}\n", *sections(DataModule),
        "## Callbacks\n",
        "`Trainer(callbacks=[...])`. [Ready-made callbacks](../how-to/callbacks.md) shows when to use which.\n",
        *classes(callbacks, leave_out=("Callback", "summarize")),
        "## Loggers\n", "`Trainer(logger=...)`, from `torchhal.trainer.loggers`.\n", *classes(loggers),
        "### seed_everything\n", f"{signature('torchhal.seed_everything', torchhal.seed_everything)}\n",
        f"{markdown(torchhal.seed_everything.__doc__ or '')}\n",
        "## Names of other trainers\n",
        "What an argument, attribute or class of Lightning, Accelerate, the Hugging Face Trainer or Keras is called\n"
        "here. `Trainer(num_train_epochs=3)` says it too: the error names what to write.\n",
        *foreign_names(),
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


# -- tables --------------------------------------------------------------------------------------------------


def table(heading: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield f"| {heading} | |\n|---|---|"
    for name, meaning in rows.items():
        yield f"| `{name}` | {in_a_cell(meaning)} |"


def in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def arguments(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the table of a class's or function's arguments: name, default, and what the docstring says."""
    said = described_arguments(function.__doc__ or "")
    parameters = inspect.signature(function).parameters.values()
    rows = [one for one in parameters if one.name != "self" and one.kind is not one.VAR_KEYWORD]
    if not any(one.name in said for one in rows):
        return
    yield "| argument | default | |\n|---|---|---|"
    for one in rows:
        default = "required" if one.default is one.empty else f"`{shown(one.default)}`"
        yield f"| `{one.name}` | {default} | {said.get(one.name, '')} |"


def described_arguments(docstring: str) -> dict[str, str]:
    """Return argument -> description, of the section ``Args:`` of a docstring."""
    _, _, section = inspect.cleandoc(docstring).partition("Args:\n")
    items: list[str] = []
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        if line.startswith("     "):
            items[-1] += f" {line.strip()}"
        else:
            items.append(line.strip())
    pairs = (item.partition(": ") for item in items)
    return {name.strip("* "): in_a_cell(markdown(meaning)) for name, _, meaning in pairs}


def shown(default: object) -> str:
    """Return the default of an argument as it is written in code."""
    return default.__name__ if callable(default) else repr(default).replace("'", '"')


def attributes(cls: type[Any], others: Mapping[str, str] | None = None) -> Iterator[str]:
    """Return the table of ``others``, and of the documented public properties."""
    found = dict(others or {})
    for base in reversed(own_bases(cls)):
        for name, value in vars(base).items():
            if isinstance(value, property) and value.__doc__ and not name.startswith("_"):
                found[name] = first_paragraph(value.__doc__)
    return table("attribute", found)


def hooks() -> Iterator[str]:
    yield "| hook | of a | |\n|---|---|---|"
    of_module, of_callback = dict(public_functions(ModuleHooks)), dict(public_functions(Callback))
    in_order = [*of_module, *(name for name in of_callback if name not in of_module)]
    for name in in_order:
        module, callback = of_module.get(name), of_callback.get(name)
        owners = " and ".join(["module"] * (module is not None) + ["callback"] * (callback is not None))
        names = list(inspect.signature(module or callback).parameters)[1 if module else 3 :]
        said = next(one.__doc__ for one in (module, callback) if one is not None and one.__doc__)
        yield f"| `{name}({', '.join(names)})` | {owners} | {first_paragraph(said)} |"


def foreign_names() -> Iterator[str]:
    yield "| elsewhere | here |\n|---|---|"
    for advice, words in _ARGUMENTS.items():
        yield f"| {', '.join(f'`{word}`' for word in words.split())} | {in_a_cell(advice.format(value='...'))} |"
    for name, advice in ATTRIBUTES.items():
        yield f"| `trainer.{name}` | {in_a_cell(advice)} |"
    for name, here in NAMES.items():
        yield f"| `{name}` | {here} |"


# -- sections ------------------------------------------------------------------------------------------------


def sections(cls: type[Any], leave_out: Any = ()) -> Iterator[str]:
    """Yield a section for each public method of a class, and of the private bases among which it is divided."""
    found = {}
    for base in reversed(own_bases(cls)):
        found.update({name: function for name, function in public_functions(base) if name not in leave_out})
    for name, function in found.items():
        if function.__doc__:
            yield f"### {cls.__name__}.{name}\n\n{signature(name, function)}\n\n{markdown(function.__doc__)}\n"


def classes(module: Any, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a section for each public class of a module: what it is, and the table of its arguments."""
    for name in module.__all__:
        if name not in leave_out:
            cls = getattr(module, name)
            doc = inspect.cleandoc(cls.__doc__ or "")
            about = re.split(r"^(?:Args|Raises|Attributes):$", doc, flags=re.MULTILINE)[0]
            yield f"### {name}\n\n{markdown(about)}\n"
            if rows := list(arguments(cls)):
                yield "\n".join([*rows, ""])


def own_bases(cls: type[Any]) -> list[type[Any]]:
    return [base for base in cls.__mro__ if base.__module__.startswith("torchhal.")]


def public_functions(cls: type[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that a class itself defines, class methods too."""
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod) else value
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


def signature(name: str, function: Callable[..., Any]) -> str:
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls")]
    shown = inspect.Signature([one.replace(annotation=one.empty) for one in parameters])
    return f"`{name}{shown}`"


def first_paragraph(docstring: str) -> str:
    return in_a_cell(markdown(inspect.cleandoc(docstring).split("\n\n")[0]))
