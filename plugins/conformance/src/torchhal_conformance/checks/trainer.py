"""SYS: a Trainer that uses the component trains, resumes, stops and evaluates as with the core's own components."""

from __future__ import annotations

import importlib.metadata
import inspect
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal.errors import AcceleratorUnavailableError
from torchhal.plugin import Availability
from torchhal.resolve import Request, resolve
from torchhal.testing import isolated_registry
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import MissingRequirement, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance._subprocesses import Job
from torchhal_conformance.checks._strategy_run import tolerance_of

BATCH = 12
SAMPLES = 48
FOREVER = 10**6
"""Epochs for a run that something else ends."""


class ThreeLayers(nn.Module):
    """Model that learns y = (3 x + 1) / 12 with layers ``body.0``, ``2`` and ``4``: plans and pipelines divide them.

    It always begins with the same weights, and its gradients are below 1, so that no scaled one overflows in float16.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def data() -> TensorDataset:
    x = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)
    return TensorDataset(x, (3 * x + 1) / 12)


def folder_arguments(component: ComponentUnderTest, folder: str) -> dict[str, str]:
    """Return the argument with which a logger writes below ``folder``; none where it takes none, or has one."""
    is_free = "save_dir" not in component.arguments and _takes(component.cls, "save_dir")
    return {"save_dir": folder} if is_free else {}


def _takes(cls: type[Any], name: str) -> bool:
    """Return whether a constructor has a parameter; one with ``**kwargs`` has those of the class's base too."""
    for base in cls.__mro__:
        if (own := vars(base).get("__init__")) is not None:
            parameters = inspect.signature(own).parameters
            if name in parameters or all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
                return name in parameters
    return False


def component_argument(component: ComponentUnderTest, folder: str) -> Any:
    """Return the Trainer's argument for the component: its alias where that suffices, else an instance.

    A logger that is made by alias writes into the Trainer's folder, any other into ``folder``.
    """
    is_logger = component.kind == "logger"
    if not isinstance(component.target, str):
        return component.create(**(folder_arguments(component, folder) if is_logger else {}))
    if not component.arguments:
        return component.target
    return {component.target: dict(component.arguments)} if is_logger else component.create()


def trainer(rank: RankContext, **options: Any) -> Any:
    """Return a Trainer with the component under test, which uses one of these processes per device."""
    if rank.component.kind == "cluster_environment":
        raise NotApplicable("the kit starts these processes, and not its launcher")
    return trainer_of(rank.component, rank.size, rank.folder, **options)


def trainer_of(component: ComponentUnderTest, size: int, folder: str, **options: Any) -> Any:
    """Return a Trainer with the component for ``size`` processes, whoever starts them."""
    from torchhal import Trainer

    kind, given = component.kind, component_argument(component, folder)
    devices, num_nodes = (1, size) if component.one_per_node else (size, 1)
    multi = kind != "strategy" or component.cls.multi_device
    arguments: dict[str, Any] = {
        "accelerator": component.accelerator, "strategy": "ddp" if size > 1 else "auto",
        "devices": devices if multi else 1, "num_nodes": num_nodes if multi else 1, "default_root_dir": folder,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    if kind == "checkpoint_io":
        arguments["plugins"] = [given]
    elif kind == "callback":
        # it may be what saves, or want a logger
        arguments |= {"callbacks": [given], "enable_checkpointing": None, "logger": True}
    else:
        arguments[kind] = given
    return Trainer(**{**arguments, **options})


def loader(rank: RankContext) -> Any:
    """Return a loader of this rank's shares of the global batches; ranks of one replica have the same."""
    division = rank.create_strategy().distributed_sampler_kwargs
    replicas = 1 if division is None else division["num_replicas"]
    return DataLoader(data(), batch_size=BATCH // replicas, shuffle=False)


def plain_loop(epochs: int) -> ThreeLayers:
    """Return the model that one process trains on the joined batches, without torchhal."""
    plain = ThreeLayers()
    optimizer = plain.configure_optimizers()
    for _ in range(epochs):
        for batch in DataLoader(data(), batch_size=BATCH):
            optimizer.zero_grad()
            plain.training_step(batch, 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return plain


def learned(model: nn.Module) -> list[float]:
    """Return every weight of ``model``."""
    weights = [parameter.detach().double().cpu().flatten() for parameter in model.parameters()]
    found: list[float] = torch.cat(weights).tolist()
    return found


@check("SYS-01")
def from_string(context: CheckContext) -> None:
    """Every alias of the component becomes an object of its class from the string alone.

    Why: an alias in the table that raises at the first use was never tried.
    Fix: Component.defaults for what the constructor needs.
    """
    from torchhal import registry

    component = context.component
    if not isinstance(component.target, str):
        raise NotApplicable("it has no alias yet")
    if not (state := component.entry.availability()):
        raise MissingRequirement(state.reason)
    for name in component.entry.names:
        made = registry.find(component.kind, name).create(**component.arguments)
        require(isinstance(made, component.cls), f"{name!r} made a {type(made).__name__}")


@check("SYS-02", needs=["device"], world_sizes=(1, 2), timeout=60, after=("ACC-12", "PRE-09", "STR-14"))
def regression(rank: RankContext) -> None:
    """A Trainer fits a line, and its weights are those of the plain loop on the joined batches.

    Those of a lossy strategy within its tolerance, after one epoch. Not asked of callbacks, which may change them.

    Why: each component may keep its contract and the whole not train.
    Fix: the checks of its kind first; then compare the first step.
    """
    if rank.component.kind == "callback":
        raise NotApplicable("a callback may change what is trained: CBK-03 and SYS-03 compare its runs")
    model = ThreeLayers()
    lossy = "lossy" in rank.component.declared
    epochs = 1 if lossy else 4
    used = trainer(rank, max_epochs=epochs)
    used.fit(model, loader(rank))
    plain = plain_loop(epochs)  # after it: a backward on the CPU settles for good which devices torch's autograd knows
    tolerance = 0.05 if rank.component.kind == "precision" else 1e-4
    if lossy:  # its four steps add up to 2.5 times the five of 0.1 for which the tolerance is declared
        tolerance = 2.5 * tolerance_of(used.strategy, "weights", tolerance)
    close(f"the weights after {epochs} epoch(s)", learned(model), learned(plain), tolerance)
    rank.gather("done")


@check("SYS-03", needs=["device"], world_sizes=(1, 2), timeout=60, after=("PRE-16", "CIO-01", "STR-22", "SYS-02"))
def resume(rank: RankContext) -> None:
    """Two epochs, a checkpoint, and two more by another Trainer are four epochs.

    Changed: the first Trainer ends by itself; a kill in the midst of a save is CIO-08's.

    Why: a checkpoint without the optimizer's state continues another run.
    Fix: see STR-22 and PRE-16.
    """
    whole, first, second = ThreeLayers(), ThreeLayers(), ThreeLayers()
    trainer(rank, max_epochs=4).fit(whole, loader(rank))
    path = os.path.join(rank.folder, "half.ckpt")
    half = trainer(rank, max_epochs=2)
    half.fit(first, loader(rank))
    half.save_checkpoint(path)
    rank.gather("saved")
    trainer(rank, max_epochs=4).fit(second, loader(rank), ckpt_path=path)
    tolerance = 0.02 if rank.component.kind == "precision" else 1e-6
    close("the weights after a resume", learned(second), learned(whole), tolerance)
    rank.gather("done")


@check("SYS-04", needs=["device"], world_sizes=(1,), timeout=60, after=("SYS-02",))
def all_loops(rank: RankContext) -> None:
    """fit, validate, test and predict run one after the other, and predictions come in the order of the data.

    Changed: in one process. In several each rank has one block of the data, in order, which the Trainer's sampler gives
    it; the blocks of several ranks are core's tests.

    Why: a wrapper made for training is in the way of an evaluation, or the second run meets what the first left.
    Fix: wrap in wrap_model(training=...), undo it in teardown.
    """
    model = ThreeLayers()
    runner = trainer(rank, max_epochs=2)
    runner.fit(model, loader(rank), loader(rank))
    for name in ("validate", "test"):
        getattr(runner, name)(model, loader(rank), verbose=False)
    predicted = torch.cat([batch.float().cpu() for batch in runner.predict(model, loader(rank))])
    plain = ThreeLayers()  # in float32, whatever the precision has made of the weights
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = plain(data().tensors[0])
    close("the predictions, in order", predicted, expected, 0.05)


class Interrupted(ThreeLayers):
    """Model that sends its process a signal in the midst of an epoch."""

    def __init__(self, signum: int | None) -> None:
        super().__init__()
        self.signum = signum
        self.steps = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # not in the step, which a strategy may compile
        self.steps += 1
        if self.steps == 6 and self.signum is not None:
            os.kill(os.getpid(), self.signum)


@check("SYS-05", needs=["device"], world_sizes=(1, 2), timeout=90, after=("SYS-02",))
def interrupted(rank: RankContext) -> None:
    """Ctrl-C in one process ends fit with KeyboardInterrupt in all of them, after the same step.

    What it saves goes on to what a run without it gives; no process is left.

    Why: the night's work is lost by the key that was meant to save it.
    Fix: run nothing in a signal handler, let what begins be finished, end in teardown what the set-up has started.
    """
    whole, second = ThreeLayers(), ThreeLayers()
    first = Interrupted(signal.SIGINT if rank.rank == rank.size - 1 else None)
    before = children()
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": FOREVER}
    stopped = trainer(rank, **options)
    raises("fit, interrupted", KeyboardInterrupt, lambda: stopped.fit(first, loader(rank)))
    steps = rank.gather(stopped.global_step)
    require(len(set(steps)) == 1, f"the ranks stopped after different numbers of steps: {steps}")
    deadline = time.monotonic() + 10
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    require(not left, f"processes are left: {', '.join(map(str, sorted(left)))}")
    saved = stopped.checkpoint_callback.interrupted_path
    require(saved and os.path.exists(saved), f"no checkpoint is there: the interrupted run's is {saved!r}")
    last = stopped.global_step + 5
    trainer(rank, max_epochs=FOREVER, max_steps=last).fit(whole, loader(rank))
    resumed = trainer(rank, **options, max_steps=last)
    resumed.fit(second, loader(rank), ckpt_path="last")
    same("how many steps both have made together", resumed.global_step, last)
    tolerance = 0.02 if rank.component.kind == "precision" else 1e-6
    close("the weights after an interrupted run and the rest", learned(second), learned(whole), tolerance)
    rank.gather("done")


def children() -> set[int]:
    """Return the living child processes' ids; where there is no /proc, those of multiprocessing."""
    found = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = entry.read_text().rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        # torch's own helper for shared memory stays as long as its parent
        if int(parent) == os.getpid() and state != "Z" and "torch_shm_manag" not in name:
            found.add(int(entry.parent.name))
    return found


@check("SYS-06", after=("ACC-01", "ACC-19"))
def unavailable(context: CheckContext) -> None:
    """Named where its hardware is missing, the accelerator is an error with the reason; "auto" falls back, and says so.

    On a machine that has it, this is tried on a subclass that says it is missing.

    Why: a job that trains on the CPU without a word is found when its bill comes.
    Fix: an Availability with a reason; leave the choice to resolve.
    """
    if context.component.kind != "accelerator":
        raise NotApplicable("the component is no accelerator")
    cls = context.component.cls
    if cls.device_type == "cpu" and cls.oversubscribable:
        raise NotApplicable("the host's processors are always there")
    reason = cls.availability().reason or "taken away for a check"
    members = {"availability": classmethod(lambda cls: Availability(False, reason)), "auto_priority": 99}
    absent = type(cls.__name__, (cls,), members)
    with isolated_registry() as registry:
        registry.register("accelerator", "absent", absent)
        raises(
            "the accelerator by its name",
            AcceleratorUnavailableError,
            lambda: resolve(Request(accelerator="absent")),
            reason,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = resolve(Request(accelerator="auto", devices=1))
        same("what 'auto' falls back to", plan.accelerator.alias, "cpu")
        told = any(reason in note for note in (*plan.notes, plan.accelerator.reason))
        require(told, f"falling back from it is not told: {plan.notes}")


@check("SYS-07", features=["readme"], needs=["device", "posix"])
def readme_example(context: CheckContext) -> None:
    """The first example with a Trainer in the plugin's README runs, with the Python blocks before it, as one script.

    A block right after an HTML comment with the word no-run is left out.

    Changed: of the extended level, so that the several suites of a plugin don't all run it.

    Why: it is the first thing that anybody tries.
    Fix: make the example complete; say readme = "README.md" in pyproject.toml.
    """
    record = context.component.plugin
    if record is None:
        raise NotApplicable("the component comes from no plugin")
    metadata: Any = importlib.metadata.metadata(record.distribution)
    text = metadata.get_payload() or metadata.get("Description") or ""
    source = context.component.source
    if source is not None and (source / "README.md").exists():  # the metadata are as old as the installation
        text = (source / "README.md").read_text(encoding="utf-8")
    require(text.strip(), f"the metadata of {record.distribution} holds no README")
    program = _first_example(text)
    if program is None:
        require("Trainer(" in text, "the README shows no Trainer")
        raise MissingRequirement("every example of the README is marked no-run")
    (context.folder / "example.py").write_text(program, encoding="utf-8")
    ended = Job([sys.executable, "example.py"], context.folder).finish(300)
    require(ended.code == 0, f"the example ends with {ended.code}:\n{ended.output}")
    require(not ended.left, "the example leaves processes behind")


_BLOCK: Final = re.compile(r"(?:<!--(?P<comment>(?:(?!-->).)*)-->\s*)?^```python[^\n]*\n(?P<code>.*?)^```", re.M | re.S)


def _first_example(text: str) -> str | None:
    blocks = []
    for block in _BLOCK.finditer(text):
        if "no-run" in (block["comment"] or ""):
            continue
        blocks.append(block["code"])
        if "Trainer(" in block["code"]:
            return "\n\n".join(blocks)
    return None
