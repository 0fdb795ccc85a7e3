"""Methods that look like hooks and that no Trainer calls: removed names raise, near misses warn."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torchhal._overrides import is_of_framework
from torchhal.errors import ModelError
from torchhal.module import ModuleHooks
from torchhal.strategies._hooks import StrategyHooks
from torchhal.suggestions import nearest
from torchhal.trainer._call_signatures import binds
from torchhal.trainer.callbacks import Callback
from torchhal.trainer.data._loaders import LOADER_HOOKS

REMOVED: Final[Mapping[str, str]] = {
    "training_epoch_end": "on_train_epoch_end(self), with what the steps gave kept on self",
    "validation_epoch_end": "on_validation_epoch_end(self), with what the steps gave kept on self",
    "test_epoch_end": "on_test_epoch_end(self), with what the steps gave kept on self",
    "predict_epoch_end": "on_predict_epoch_end(self), with what the steps gave kept on self",
    "training_step_end": "training_step itself, or on_train_batch_end",
    "validation_step_end": "validation_step itself, or on_validation_batch_end",
    "test_step_end": "test_step itself, or on_test_batch_end",
    "predict_step_end": "predict_step itself, or on_predict_batch_end",
    "on_epoch_start": "on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_train_start",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "configure_sharded_model": "configure_model",
    "on_post_move_to_device": "configure_model, where weights may be tied",
    "on_keyboard_interrupt": "on_exception",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "on_test_dataloader": "test_dataloader",
    "on_predict_dataloader": "predict_dataloader",
    "tbptt_split_batch": "training_step, with self.automatic_optimization = False and a backward for each piece",
    "get_progress_bar_dict": "self.log(..., prog_bar=True)",
}
"""Removed hooks of other trainers, and their replacements."""

_GOT_OUTPUTS: Final = frozenset({"training_epoch_end", "validation_epoch_end", "test_epoch_end", "predict_epoch_end"})

_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
_WITHOUT_ARGUMENTS: Final = frozenset({"configure_optimizers", *LOADER_HOOKS.values()})
_MODULE: Final = frozenset(name for name in vars(ModuleHooks) if not name.startswith("_")) | {
    *_STEPS,
    *_WITHOUT_ARGUMENTS,
}
_CALLBACK: Final = frozenset(name for name in vars(Callback) if not name.startswith("_"))
_STRATEGY: Final = frozenset(name for name in vars(StrategyHooks) if name.startswith("on_"))
_DATA: Final = frozenset(
    {"prepare_data", "setup", "teardown", "state_dict", "load_state_dict", *LOADER_HOOKS.values()}
    | {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
)
_ENDINGS: Final = ("_step", "_epoch_end", "_dataloader")
_SAME_WORD: Final[Mapping[str, str]] = {
    "val": "validation",
    "valid": "validation",
    "training": "train",
    "testing": "test",
    "prediction": "predict",
    "begin": "start",
    "step": "batch",
}
"""Words in the names of other libraries' hooks, and their equivalents here."""


def check_hook_names(
    module: Any, datamodule: Any, callbacks: list[Any], *, is_adapted: Callable[[Any], bool]
) -> list[str]:
    """Raise ModelError for a removed hook, or one that can't be called; return warnings about near misses.

    Only methods defined by users are checked, and only those named like hooks:
    ``on_...``, ``..._step``, ``..._epoch_end`` and ``..._dataloader``.

    Args:
        module: the model.
        datamodule: it, or None.
        callbacks: of the Trainer.
        is_adapted: whether an object was written for another framework: what a release of that has removed is often
            left in published classes, and is a warning unless it got the outputs of an epoch.
    """
    said = []
    owners = [(module, _MODULE, ModuleHooks), (datamodule, _DATA, ModuleHooks)]
    for owner, known, base in (*owners, *((callback, _CALLBACK, Callback) for callback in callbacks)):
        own = set(_own_methods(owner))
        _check_signatures(owner, own & known, base)
        for name in sorted(own - known):
            what = f"{type(owner).__name__}.{name}"
            if name in REMOVED:
                problem = f"{what} is no hook any more, and would never be called: use {REMOVED[name]}"
                if name in _GOT_OUTPUTS or not is_adapted(owner):
                    raise ModelError(problem)
                said.append(problem)
            if name.startswith("on_") and name in _MODULE | _CALLBACK:
                where = "models and callbacks" if name in _MODULE & _CALLBACK else "models"
                said.append(f"{what} is a hook of {where}, and the Trainer never calls it there")
            elif meant := _meant(name, known, own):
                said.append(f"{what} is no hook, and the Trainer never calls it; did you mean {meant}?")
    return said


def check_strategy_hooks(strategy: Any) -> list[str]:
    """Return warnings about methods of a strategy that are named as hooks of callbacks and that no loop calls."""
    said = []
    for name in sorted(set(_own_methods(strategy)) & (_CALLBACK | _MODULE) - _STRATEGY):
        if name.startswith("on_"):
            instead = re.sub("(validation|test|predict)_(epoch_)?", "evaluation_", name)
            use = f"define {instead}, which has the stage as its argument" if instead in _STRATEGY else "use a callback"
            said.append(
                f"{type(strategy).__name__}.{name} is no hook of strategies, and the Trainer never calls it: {use}"
            )
    return said


def near_miss(owner: Any, hook: str) -> str | None:
    """Return a method that was probably meant to be ``hook``."""
    return next((name for name in sorted(set(_own_methods(owner))) if _meant(name, frozenset({hook}), set())), None)


def _check_signatures(owner: Any, hooks: set[str], base: type) -> None:
    """Raise ModelError for a hook that takes other arguments than the Trainer calls it with: those of ``base``'s."""
    for name in sorted(hooks):
        what, hook = f"{type(owner).__name__}.{name}", getattr(owner, name)
        try:
            shown, called = inspect.signature(hook), inspect.signature(hook, follow_wrapped=False)
        except (TypeError, ValueError):  # of a builtin
            continue
        if "optimizer_idx" in shown.parameters:
            raise ModelError(
                f"{what} takes 'optimizer_idx', which no Trainer gives it any more: with several optimizers set "
                "self.automatic_optimization = False, and step self.optimizers() in training_step"
            )
        inherited = getattr(base, name, None)
        if isinstance(inherited, property) or (inherited is None and name not in _WITHOUT_ARGUMENTS):
            continue
        given = list(inspect.signature(inherited).parameters.values())[1:] if inherited is not None else []
        words = [each for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
        without = [each for each in words if each.name != "dataloader_idx" or each.default is each.empty]
        ways: list[tuple[list[None], dict[str, None]]] = [([None] * len(words), {}), ([None] * len(without), {})]
        if len(without) < len(words):
            ways.append(([None] * len(without), {"dataloader_idx": None}))
        if not any(binds(called, *args, **kwargs) for args, kwargs in ways):
            raise ModelError(
                f"{what} must take ({', '.join(['self', *(each.name for each in words)])}), with which the Trainer "
                f"calls it; it is defined as {name}{shown}"
            )


def _own_methods(owner: Any) -> Iterator[str]:
    """Names of the functions that the user has defined, on a class or on the object."""
    if owner is None:
        return
    for cls in type(owner).__mro__:
        if is_of_framework(cls) or cls.__module__.partition(".")[0] == "torch":
            continue
        yield from (name for name, value in vars(cls).items() if callable(value) and not name.startswith("_"))
    yield from (name for name, value in vars(owner).items() if inspect.isroutine(value) and not name.startswith("_"))


def _meant(name: str, known: frozenset[str], own: set[str]) -> str | None:
    """Return the hook that ``name`` was probably meant to be, unless the object has that one too."""
    meant = None
    if name.startswith("on_"):
        usual = "_".join(_SAME_WORD.get(word, word) for word in name.split("_"))
        meant = usual if usual in known else REMOVED.get(usual)
        meant = meant or nearest(name, known, cutoff=0.87) or nearest(usual, known, cutoff=0.87)
    elif same := next((hook for hook in sorted(known) if _without_case(hook) == _without_case(name)), None):
        meant = same
    else:
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        if name.startswith("configure_"):
            meant = nearest(name, known, cutoff=0.87)
        elif ending is not None:
            meant = _with_that_ending(name.removesuffix(ending), ending, known)
    return None if meant in own else meant


def _without_case(name: str) -> str:
    """Return the one form of ``set_up``, ``setUp`` and ``setups``."""
    return name.replace("_", "").lower().removesuffix("s")


def _with_that_ending(stem: str, ending: str, known: frozenset[str]) -> str | None:
    """Return the known hook of that ending whose stem is ``stem`` shortened, extended, or nearly equal."""
    stems = {hook.removesuffix(ending).removeprefix("on_"): hook for hook in known if hook.endswith(ending)}
    for other, hook in stems.items():
        short, long = sorted((stem, other), key=len)
        if long.startswith(short) and (len(short) >= 4 or short == "val"):
            return hook
    near = nearest(stem, stems, cutoff=0.85)
    return None if near is None else stems[near]
