"""CBK: a callback works in every call of a Trainer, keeps its state in checkpoints, and can be used again."""

from __future__ import annotations

import os
import pickle
from typing import Any, Final

import torch

from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks.trainer import BATCH, ThreeLayers, data, learned, loader, trainer

_MAX_COUNT: Final = 1000
"""Greater integers are no counts of the kit's short fits."""


class Logs(ThreeLayers):
    """Model that logs its losses, as callbacks monitor them."""

    log: Any

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))

    test_step = validation_step


def model(*mixins: type) -> Any:
    """Return a module that logs, of which everything else is that of ``mixins`` and of the kit's small net."""
    from torchhal import Module

    return type("LoggingThreeLayers", (*mixins, Logs, Module), {})()


def batches() -> Any:
    return torch.utils.data.DataLoader(data(), batch_size=BATCH)


def trainer_with(context: CheckContext, *callbacks: Any, **options: Any) -> Any:
    """Return a quiet Trainer of one process with ``callbacks``."""
    from torchhal import Trainer

    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator=context.component.accelerator, devices=1, callbacks=list(callbacks), enable_checkpointing=None,
        default_root_dir=str(context.folder), **{"max_epochs": 2, **quiet, **options},
    )  # fmt: skip


def leaves(value: Any, place: str = "") -> dict[str, Any]:
    """Return what is in the containers of ``value``, each by its place, without paths."""
    if isinstance(value, dict):
        items = [(f"{place}[{key!r}]" if place else str(key), one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{place}[{index}]", one) for index, one in enumerate(value)]
    else:
        return {} if isinstance(value, str) and os.path.isabs(value) else {place: value}
    return {inner: leaf for outer, one in items for inner, leaf in leaves(one, outer).items()}


def counts(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is in ``state``, by its place; of numbers that may be times that go on, only that they are there."""

    def is_time(leaf: Any) -> bool:
        return isinstance(leaf, float) or (isinstance(leaf, int) and abs(leaf) > _MAX_COUNT)

    return {place: "a number" if is_time(leaf) else leaf for place, leaf in leaves(state).items()}


@check("CBK-01", since="0.2", needs=["device"], after=("GEN-11",))
def every_call(context: CheckContext) -> None:
    """Every call of a Trainer runs with it: fit with and without validation, validate, test, predict, a trial run.

    Why: a hook that counts on a loader, a logger or an epoch fails in the call that has none.
    Fix: look at trainer.state and at what is None before you use it.
    """
    for options in ({}, {"max_epochs": 1, "limit_val_batches": 0}, {"fast_dev_run": True, "max_epochs": None}):
        module = model()
        used = trainer_with(context, context.create(), **options)
        used.fit(module, batches(), batches())
        used.validate(module, batches(), verbose=False)
        used.test(module, batches(), verbose=False)
        used.predict(module, batches())


@check("CBK-02", since="0.2", needs=["device"], after=("CBK-01",))
def state(context: CheckContext) -> None:
    """What state_dict() returns is plain data, and another object that has loaded it returns it again, but for paths.

    Why: checkpoints are read with weights_only=True, and a state that isn't whole continues another run.
    Fix: return numbers, texts and tensors; load all that is returned.
    """
    callback = context.create()
    trainer_with(context, callback).fit(model(), batches(), batches())
    saved = callback.state_dict()
    path = context.folder / "state.pt"
    torch.save(saved, path)
    try:
        read = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckFailed(f"state_dict() returned more than plain data: {error}") from error
    other = context.create()
    if saved:
        other.load_state_dict(read)
        _same_but_for_paths(other.state_dict(), saved)


def _same_but_for_paths(returned: dict[str, Any], saved: dict[str, Any]) -> None:
    """Fail unless an object that has loaded ``saved`` has ``returned`` the same, its keys in any order."""
    same("the keys of the state after it was loaded", sorted(returned), sorted(saved))
    for key in sorted(saved):
        if not _names_files(saved[key]):
            same(f"the state's {key!r} after it was loaded", returned[key], saved[key])


def _names_files(value: Any) -> bool:
    """Return whether ``value`` holds a path: those of another run's folder need not be loaded."""
    if isinstance(value, dict):
        return any(map(_names_files, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return any(map(_names_files, value))
    return isinstance(value, str) and os.path.isabs(value)


@check("CBK-03", since="0.2", needs=["device"], after=("CBK-01",))
def used_again(context: CheckContext) -> None:
    """The same object in the fit of another Trainer, of another model, does what a new object does.

    Why: notebooks and searches make a callback once, and its count from the first fit ends the second one.
    Fix: begin anew in setup; what belongs to a run that continues comes after it, by load_state_dict.
    """
    callback, weights = context.create(), []
    for used in (callback, callback, context.create()):
        module = model()
        trainer_with(context, used).fit(module, batches(), batches())
        weights.append(learned(module))
    same("the weights of a second fit with it, in number", len(weights[1]), len(weights[2]))
    close("the weights of a second fit with it", weights[1], weights[2], 0.0)


@check("CBK-04", since="0.2", needs=["device"], after=("CBK-01", "GEN-19"))
def pickles_in_use(context: CheckContext) -> None:
    """A callback that has been through a fit pickles, and the copy has its state.

    Why: launchers take it into their processes by pickle, of a second fit too, and bring it back.
    Fix: drop handles, threads and the Trainer in __getstate__, and keep what state_dict returns.
    """
    callback = context.create()
    trainer_with(context, callback).fit(model(), batches(), batches())
    try:
        copied = pickle.loads(pickle.dumps(callback))
    except Exception as error:
        raise CheckFailed(f"a callback in use doesn't survive pickle ({type(error).__name__}: {error})") from error
    require(type(copied) is type(callback), f"unpickled as a {type(copied).__name__}")
    same("what state_dict() of the copy returns", counts(copied.state_dict()), counts(callback.state_dict()))


@check("CBK-05", since="0.2", needs=["device"], world_sizes=(2,), timeout=60, after=("CBK-01",))
def on_two_ranks(rank: RankContext) -> None:
    """On two ranks a fit ends on both of them, at one step and with the same weights; both load the state of rank 0.

    Why: a hook that decides by a rank's own clock, file or loss lets one of them wait for ever.
    Fix: agree by trainer.strategy.broadcast or reduce, in a hook that every rank calls; load on every rank.
    """
    from torchhal import LambdaCallback

    module, callback, other = model(), rank.component.create(), rank.component.create()
    loaded = []

    def load(trainer: Any, module: Any) -> None:  # while the ranks can communicate, as where a Trainer loads
        saved = rank.gather(callback.state_dict())[0]
        if saved:
            other.load_state_dict(saved)
            loaded.append((other.state_dict(), saved))

    used = trainer(rank, max_epochs=2, callbacks=[callback, LambdaCallback(on_train_end=load)])
    used.fit(module, loader(rank), loader(rank))
    for states in loaded:
        _same_but_for_paths(*states)
    steps = rank.gather(used.global_step)
    same("the optimizer steps of the ranks", len(set(steps)), 1)
    weights = rank.gather(learned(module))
    close("the weights of the other rank", weights[1], weights[0], 0.0)
