"""CBK: a callback's state is a copy under a key of its class, belongs to one object, and is whole after a resume."""

from __future__ import annotations

import copy
import math
import os
import time
from typing import Any, Final

import torch

from torchhal import LambdaCallback
from torchhal.errors import CheckpointMismatchError
from torchhal.trainer import callbacks
from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks.callbacks import batches, counts, leaves, model, trainer_with
from torchhal_conformance.checks.trainer import learned

REPLACED: Final = ("", "progress_bar", "model_summary", "checkpoint")
"""Values of ``Callback.replaces``."""

_MISSING: Final = "nothing"


@check("CBK-06", since="0.2", needs=["device"], after=("CBK-01",))
def continues(context: CheckContext) -> None:
    """A fit of two epochs that is continued by a new object for two more ends as one of four: weights, state, counts.

    Compared are the weights, what the callback puts into checkpoints, and the numbers, texts and lists in its public
    attributes that grow with training; but not what depends on the time.

    Why: what a callback counts, averages or has changed is part of the run.
    Fix: keep it in state_dict, and reset it neither in on_fit_start nor in on_train_start, which come after loading;
        change optimizers and models where a resumed fit does so too. Begin the names of what isn't restored with _.
    """
    path = os.path.join(str(context.folder), "half.ckpt")
    without = trainer_with(context, max_epochs=1)
    without.fit(model(), batches(), batches())
    known = set(_saved(without, path)) - {"callbacks"}

    def fit(epochs: int, *more: Any, **options: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
        module, callback = model(), context.create()
        used = trainer_with(context, callback, *more, max_epochs=epochs)
        used.fit(module, batches(), batches(), **options)
        saved = {name: value for name, value in _saved(used, path).items() if name not in known}
        return learned(module), leaves(saved), leaves(_public(callback))

    weights, saved, attributes = fit(4)
    _, _, early = fit(2)
    again = fit(4, ckpt_path=path)
    close("the weights after a resume", again[0], weights, 1e-6)
    growing = {name: value for name, value in attributes.items() if not _near(early.get(name, _MISSING), value)}
    differ = [place for place in {**saved, **again[1]} if not _near_at(place, again[1], saved)]
    strange = [name for name in growing if not _near_at(name, again[2], growing)]
    if differ or strange:  # in a slower run times differ too
        slow = fit(4, LambdaCallback(on_train_epoch_end=lambda *_: time.sleep(0.26)))
        differ = [place for place in differ if _near_at(place, slow[1], saved)]
        strange = [name for name in strange if _near_at(name, slow[2], growing)]
    for found, what, got, expected in (
        (differ, "the checkpoint's", again[1], saved),
        (strange, "its", again[2], growing),
    ):
        for place in found:
            told = f"{got.get(place, _MISSING)!r}, without the interruption {expected.get(place, _MISSING)!r}"
            raise CheckFailed(f"{what} {place} after a resume is {told}")


def _saved(used: Any, path: str) -> dict[str, Any]:
    """Return the checkpoint that ``used`` saves as ``path``."""
    used.save_checkpoint(path)
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def _public(callback: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items() if not name.startswith("_") and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _near_at(place: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    return _near(one.get(place, _MISSING), other.get(place, _MISSING))


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), 1e-6, 1e-6, equal_nan=True)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6) or (one != one and other != other)
    return bool(one == other)


@check("CBK-07", since="0.2", needs=["device"], after=("CBK-02",))
def state_is_copied(context: CheckContext) -> None:
    """state_dict() changes nothing and returns lists and dicts of its own; load_state_dict() leaves what it is given.

    Changed: a tensor that is returned may be the one in use, as in torch's own states.

    Why: a state may be kept to go back to it, and loaded several times, or into several callbacks.
    Fix: copy lists and dicts in both, and what is changed in place of the tensors that are loaded; reset nothing in
        state_dict, and pop nothing in load_state_dict.
    """
    callback = context.create()
    taken: list[tuple[Any, Any]] = []

    class Takes(callbacks.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            state = callback.state_dict()
            taken.append((state, _without_tensors(state)))
            same("what state_dict() returns when it is called again", counts(callback.state_dict()), counts(state))

    trainer_with(context, callback, Takes()).fit(model(), batches(), batches())
    for state, then in taken:
        same("what state_dict() had returned in training, after the fit", _without_tensors(state), then)
    saved = copy.deepcopy(callback.state_dict())
    if not saved:
        return
    given, other = copy.deepcopy(saved), context.create()
    other.load_state_dict(given)
    same("the state that load_state_dict() was given", given, saved)
    trainer_with(context, other).fit(model(), batches(), batches())
    same("the state that load_state_dict() was given, after a fit", given, saved)


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    found = leaves(state)
    return {place: "a tensor" if isinstance(leaf, torch.Tensor) else leaf for place, leaf in found.items()}


@check("CBK-08", since="0.2", after=("GEN-11",))
def names(context: CheckContext) -> None:
    """state_key is a text, the same for another object and no other class's; replaces is one of the contract's values.

    Why: a state under another key isn't found by the resumed run, and an unknown ``replaces`` replaces nothing.
    Fix: leave state_key as it is, or build it of the class's name and the arguments.
    """
    one, other = context.create(), context.create()
    key = one.state_key
    require(isinstance(key, str) and key, f"state_key is {key!r}, expected a text")
    same("the state_key of another object", other.state_key, key)
    others = {name for name in callbacks.__all__ if name != type(one).__qualname__}
    require(key not in others, f"state_key is {key!r}, the name of another class")
    require(one.replaces in REPLACED, f"replaces is {one.replaces!r}, expected one of {REPLACED}")


@check("CBK-09", since="0.2", needs=["device"], after=("CBK-02", "CBK-04"))
def objects_apart(context: CheckContext) -> None:
    """Each object has a state of its own: another one's fit doesn't change it, nor that of its copy.

    Why: searches run several Trainers in one process, with callbacks that are made or copied for each.
    Fix: make lists in __init__ and not on the class; copy them in __deepcopy__.
    """
    callback = context.create()
    trainer_with(context, callback).fit(model(), batches(), batches())
    before = counts(callback.state_dict())
    trainer_with(context, context.create()).fit(model(), batches(), batches())
    same("the state after the fit of another object", counts(callback.state_dict()), before)
    copied = copy.deepcopy(callback)
    require(copied is not callback, "copy.deepcopy() returned the same object")
    trainer_with(context, copied).fit(model(), batches(), batches())
    same("the state after the fit of a copy", counts(callback.state_dict()), before)


@check("CBK-10", since="0.2", needs=["device"], after=("CBK-06",))
def joins(context: CheckContext) -> None:
    """A checkpoint of a run without it can be continued with it; where it can't join, CheckpointMismatchError says so.

    Why: callbacks are added to runs that have begun.
    Fix: look whether your entry is in the checkpoint, and begin anew without it.
    """
    path = os.path.join(str(context.folder), "without.ckpt")
    without = trainer_with(context, max_epochs=1)
    without.fit(model(), batches(), batches())
    without.save_checkpoint(path)
    try:
        trainer_with(context, context.create()).fit(model(), batches(), batches(), ckpt_path=path)
    except CheckpointMismatchError as error:
        require(type(context.create()).__name__ in str(error), f"the refusal doesn't name the callback: {error}")
