"""CBK: a callback's hooks change nothing that the model or another callback uses, and teardown leaves nothing."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from torchhal import rng
from torchhal.strategies import overrides
from torchhal.trainer.callbacks import Callback
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._process_state import process_state
from torchhal_conformance.checks.callbacks import batches, model, trainer_with
from torchhal_conformance.checks.trainer import loader, trainer

_WATCHED: Final = (
    *("on_train_epoch", "on_train_batch", "on_before", "on_after"),
    *("on_sanity", "on_validation", "on_test", "on_predict"),
)
"""Beginnings of the names of these hooks."""


@check("CBK-11", since="0.2", needs=["device"], after=("CBK-01",))
def cleans_up(context: CheckContext) -> None:
    """After each call of a Trainer, also one that failed, the model has its hooks of before, the process its handlers.

    Why: after ten calls a forward hook that stays runs ten times.
    Fix: keep what register_forward_hook and signal.signal return, and undo both in teardown.
    """
    module, broken = model(), model(Fails)
    with _in_folder(str(context.folder)):
        used, again = (trainer_with(context, context.create(), max_epochs=1) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "fit": lambda: used.fit(module, batches(), batches()),
        "validate": lambda: used.validate(module, batches(), verbose=False),
        "test": lambda: used.test(module, batches(), verbose=False),
        "predict": lambda: used.predict(module, batches()),
        "a fit that failed": lambda: raises("a failing fit", _Failure, lambda: again.fit(broken, batches(), batches())),
    }
    with _in_folder(str(context.folder)), _own_handlers():
        before = process_state()
        for name, call in calls.items():
            call()
            same(f"the model's hooks after {name}", {**_hooks(module), **_hooks(broken)}, {})
            same(f"the process after {name}", process_state(), before)


class _Failure(Exception):
    """What the model raises."""


class Fails:
    """Model that raises in the second step of the last rank."""

    rank, size = 0, 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.rank == self.size - 1:
            raise _Failure("raised by the check")
        return super().training_step(batch, batch_idx)  # type: ignore[misc]


@contextmanager
def _in_folder(path: str) -> Iterator[None]:
    """Work in the folder ``path``: a callback may save there what has failed."""
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Handle signals here meanwhile, so that what an earlier call has left is not there already."""
    if threading.current_thread() is not threading.main_thread():  # which alone can
        yield
        return
    names = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hooks(module: torch.nn.Module) -> dict[str, int]:
    """Return the number of hooks of each kind at each submodule and parameter that has some."""
    owners = [*module.named_modules(), *module.named_parameters()]
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
             "_post_accumulate_grad_hooks")  # fmt: skip
    counts = {f"{name}.{kind}": len(getattr(owner, kind, None) or ()) for name, owner in owners for kind in kinds}
    return {place: count for place, count in counts.items() if count}


@check("CBK-12", since="0.2", needs=["device"], after=("CBK-01",))
def only_looks(context: CheckContext) -> None:
    """Hooks of epochs, batches and steps leave batch, outputs, random numbers and training mode, and keep no graph.

    Changed: in setup and at the beginning of a fit a callback may seed; at its end it may run the data once more.

    Why: the model trains on other data, or without dropout, because somebody measures it.
    Fix: clone what you change; draw from a generator of your own; restore module.training; keep loss.detach().
    """
    callback = context.create()
    losses: list[weakref.ref[Any]] = []
    for name in dir(Callback):
        if name.startswith(_WATCHED) and overrides(callback, Callback, name):
            vars(callback)[name] = _watched(name, getattr(callback, name), losses)
    module = model()
    used = trainer_with(context, callback)
    used.fit(module, batches(), batches())
    gc.collect()
    kept = sum(loss() is not None for loss in losses)
    require(kept <= 1, f"the losses of {kept} steps are in memory after the fit, each with its graph")
    used.validate(module, batches(), verbose=False)
    used.test(module, batches(), verbose=False)
    used.predict(module, batches())


def _watched(name: str, hook: Callable[..., None], losses: list[weakref.ref[Any]]) -> Callable[..., None]:
    """Return ``hook`` with a comparison of what it must not change, before and after it."""

    @functools.wraps(hook)
    def compared(trainer: Any, module: Any, *given: Any, **options: Any) -> None:
        if name == "on_before_backward":
            losses.append(weakref.ref(given[0]))
        looked_at = given if name.endswith(("_batch_start", "_batch_end")) else ()
        expected, numbers, training = copy.deepcopy(looked_at), rng.collect_host(), module.training
        hook(trainer, module, *given, **options)
        same(f"the arguments of {name} after it", looked_at, expected)
        generators = rng.drawn_between(numbers, rng.collect_host())
        require(not generators, f"{name} drew random numbers ({', '.join(generators)})")
        same(f"module.training after {name}", module.training, training)

    return compared


@check("CBK-13", since="0.2", needs=["device"], world_sizes=(2,), timeout=30, after=("CBK-05",))
def fails_alone(rank: RankContext) -> None:
    """Where one of two ranks fails, both end: on_exception doesn't wait for the other one.

    Why: the job holds its devices until its time limit, and the error isn't shown.
    Fix: call no collective in on_exception, nor in what it calls.
    """
    module = model(Fails)
    module.rank, module.size = rank.rank, rank.size
    with _in_folder(rank.folder):
        raises(
            "a fit of which one rank fails", Exception, lambda: trainer(rank, max_epochs=1).fit(module, loader(rank))
        )
    rank.gather("ended")
