"""STR: a strategy's hooks run in pairs, over runs that end well and runs that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchhal.strategies import Strategy
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks.trainer import ThreeLayers, loader, trainer

_PAIRS = ("train", "train_epoch", "evaluation")
_BATCHES = ("train_batch", "evaluation_batch")


class _Fails(ThreeLayers):
    """Model whose validation fails at its second batch, on every rank: some may make no step themselves."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise LookupError("this validation fails")


@check("STR-55", since="0.2", needs=["device"], world_sizes=(1, 2), timeout=90)
def paired_hooks(rank: RankContext) -> None:
    """Each on_..._start of a run has its on_..._end, innermost first; nobody but the loops calls them.

    So it is in two runs after each other, and in one that fails, whose error reaches the caller as it was. There
    on_exception comes first, and neither it nor an end hook raises. A fit runs setup_model and setup_optimizers once,
    with ``trainer`` set from the set-up to the teardown.

    Why: an end that takes for granted what its start made hides the error of a run that failed, or breaks the next one.
    Fix: keep what a start makes until its end; look at ``failure`` before communicating; call no hook yourself.
    """
    if not hasattr(rank.component.cls, "step_function"):
        return
    strategy: Strategy = rank.component.create()
    log: list[str] = []
    raised: list[str] = []
    for name in dir(Strategy):
        if name.startswith("on_"):
            setattr(strategy, name, _recorded(name, getattr(strategy, name), log, raised))
    set_ups: list[tuple[str, bool]] = []
    for name in ("setup_model", "setup_optimizers"):
        setattr(strategy, name, _counted(strategy, name, set_ups))
    model = ThreeLayers()
    tested = trainer(rank, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    for number in ("first", "second"):
        log.clear()
        set_ups.clear()
        tested.fit_loop.max_epochs = 1 if number == "first" else 2
        tested.fit(model, loader(rank), loader(rank))
        _require_pairs(f"the {number} fit", log)
        expected = [("setup_model", True), ("setup_optimizers", True)]
        same(f"(set-up, whether trainer was set) in the {number} fit", set_ups, expected)
        require(strategy.trainer is None, "teardown() leaves trainer set")
        same(f"hooks of training in the {number} fit", [log.count(f"on_{name}") for name in _TRAINED], [1] * 4)
    log.clear()
    try:
        tested = trainer(rank, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
        tested.fit(_Fails(), loader(rank), loader(rank))
    except BaseException as error:
        text = f"{error} {error.__cause__}"
        require("this validation fails" in text, f"a run that failed with LookupError raised {error!r}")
    else:
        require(False, "a run whose validation raised did not fail")
    _require_pairs("a fit that failed", log)
    same("calls of on_exception", log.count("on_exception"), 1)
    after = log[log.index("on_exception") + 1 :]
    same("hooks after on_exception", after, ["on_evaluation_end", "on_train_epoch_end", "on_train_end"])
    require(not raised, f"hooks raised after the failure: {'; '.join(raised)}")
    require(strategy.failure is None, "teardown() leaves failure set")
    torch.set_grad_enabled(True)


_TRAINED = ("train_start", "train_epoch_start", "train_epoch_end", "train_end")


def _counted(strategy: Strategy, name: str, calls: list[tuple[str, bool]]) -> Callable[..., Any]:
    method = getattr(strategy, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((name, strategy.trainer is not None))
        return method(*args, **kwargs)

    return call


def _recorded(name: str, hook: Callable[..., Any], log: list[str], raised: list[str]) -> Callable[..., Any]:
    def record(*args: Any) -> Any:
        log.append(name)
        try:
            return hook(*args)
        except Exception as error:
            raised.append(f"{name}: {type(error).__name__}: {error}")
            raise

    return record


def _require_pairs(what: str, log: list[str]) -> None:
    """Require that phases in ``log`` nest, and that a batch lies within the phase that it belongs to."""
    opened: list[str] = []
    for entry in log:
        name, _, side = entry.removeprefix("on_").rpartition("_")
        if name in _PAIRS and side == "start":
            require(name not in opened, f"{what}: {entry} was called twice without an end: {log}")
            opened.append(name)
        elif name in _PAIRS:
            require(opened and opened[-1] == name, f"{what}: {entry} was called without its start: {log}")
            opened.pop()
        elif name in _BATCHES:
            phase = "train_epoch" if name == "train_batch" else "evaluation"
            require(opened and opened[-1] == phase, f"{what}: {entry} was called outside of its phase: {log}")
    require(not opened, f"{what}: no end was called for {', '.join(opened)}: {log}")
