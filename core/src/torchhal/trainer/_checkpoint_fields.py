"""The fields of a training checkpoint: their types, their ranges, and their consistency."""

from __future__ import annotations

import math
import random
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchhal._rank_state import STATES_KEY
from torchhal.checkpoint import _trainer_format as trainer_format
from torchhal.checkpoint._inspection import is_tensor
from torchhal.errors import CheckpointCorruptError, CheckpointMismatchError
from torchhal.trainer.logging._log_options import REDUCTIONS

_STAGES = ("train", "validate", "test")

_MOST = 2**53
"""Upper limit of all counts: no run reaches it, and some loops would iterate up to a larger value."""


class Field:
    """A value in a checkpoint with its place there (``"ranks/0/share"``), which every error names."""

    def __init__(self, value: Any, place: str, path: str) -> None:
        self.value = value
        self.place = place
        self.path = path

    def refuse(self, expected: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self.path!r} can't be continued from: its field {self.place!r} must be {expected} "
            f"(got {_short(self.value)}). Continue from another checkpoint, or load the weights alone into the model "
            "(load_from_checkpoint, or load_state_dict) and pass no ckpt_path"
        )

    def at(self, key: Any) -> Field:
        """Return the item ``key`` of a dict or list, which must be there."""
        try:
            value = self.value[key]
        except (KeyError, IndexError, TypeError):
            raise CheckpointCorruptError(
                f"{self.path!r} can't be continued from: it lacks the field {self._place_of(key)!r}"
            ) from None
        return Field(value, self._place_of(key), self.path)

    def _place_of(self, key: Any) -> str:
        return f"{self.place}/{key}" if self.place else str(key)

    def optional(self, key: Any) -> Field | None:
        """Return the item ``key`` of a dict, or None where there is none."""
        return self.at(key) if key in self.dict().value else None

    def dict(self) -> Field:
        if not isinstance(self.value, Mapping):
            raise self.refuse("a dict")
        return self

    def items(self) -> Iterator[Field]:
        """Those of a list."""
        if not isinstance(self.value, list | tuple):
            raise self.refuse("a list")
        return (self.at(index) for index in range(len(self.value)))

    def count(self, minimum: int = 0) -> int:
        if type(self.value) is not int or self.value < minimum:
            raise self.refuse(f"an int of at least {minimum}")
        if self.value > _MOST:
            raise self.refuse(f"an int of at most {_MOST}")
        return self.value

    def flag(self) -> bool:
        if type(self.value) is not bool:
            raise self.refuse("True or False")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.refuse("a str")
        return self.value

    def number(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.refuse("a number")

    def duration(self) -> None:
        self.number()
        if not (math.isfinite(self.value) and self.value >= 0):
            raise self.refuse("a finite number of seconds")

    def taken_by(self, take: Callable[[Any], object], expected: str) -> None:
        """Accept what a library's own function accepts in a trial call."""
        try:
            take(self.value)
        except Exception as error:
            raise self.refuse(f"{expected} ({type(error).__name__}: {error})") from error


def check_weights(checkpoint: Mapping[str, Any], path: str) -> None:
    """Raise CheckpointMismatchError unless ``state_dict`` can be a module's."""
    trainer_format.check_has_weights(checkpoint, path)
    state = Field(checkpoint["state_dict"], "state_dict", path).dict()
    for name in state.value:
        if not isinstance(name, str):
            raise state.refuse("a dict from names to tensors")


def check_training_state(checkpoint: Mapping[str, Any], path: str) -> None:
    """Raise unless all that a fit continues from is present, of the expected types, and consistent.

    Raises:
        CheckpointMismatchError: the checkpoint holds weights only, or another library has written it.
        CheckpointCorruptError: a field is missing or invalid; the message names it.
    """
    if "optimizer_states" not in checkpoint and "loops" not in checkpoint:
        raise CheckpointMismatchError(
            f"{path!r} holds weights only, so training can't continue from it: load them into the model "
            "(load_from_checkpoint, or load_state_dict) and pass no ckpt_path"
        )
    if "torchhal_format" not in checkpoint and "torchhal_version" not in checkpoint:
        raise CheckpointMismatchError(
            f"{path!r} was written by another library (it has {', '.join(map(str, list(checkpoint)[:8]))}): training "
            "can't continue from it, unless the model is that library's own and a plugin for it is installed. Its "
            "weights are in its 'state_dict': load them into the model (load_from_checkpoint, or load_state_dict), and "
            "pass no ckpt_path"
        )
    root = Field(checkpoint, "", path)
    root.at("torchhal_format")
    for state in root.at("optimizer_states").items():
        _check_optimizer_state(state.dict())
    for state in root.at("lr_schedulers").items():
        state.dict()
    root.at("precision").dict()
    if (strategy := root.optional("strategy")) is not None:
        strategy.dict()
    callbacks = root.at("callbacks").dict()
    for key in callbacks.value:
        callbacks.at(key).dict()
    _check_counters(root)
    _check_results(root.at("loops").at("results").dict())
    _check_ranks(root.at("ranks"))
    _check_rank_states(root)
    gradients = root.optional("gradients")
    if gradients is not None and gradients.value is not None:
        for name in gradients.dict().value:
            if not is_tensor(gradients.value[name]):
                raise gradients.at(name).refuse("a tensor")
    _check_trained_by(root)
    _check_frozen(root)


def _check_optimizer_state(state: Field) -> None:
    groups = state.optional("param_groups")
    if groups is None:  # an engine's own
        return
    for group in groups.items():
        list(group.dict().at("params").items())
    if (entries := state.optional("state")) is not None:
        entries.dict()


def _check_trained_by(root: Field) -> None:
    """As :func:`torchhal.trainer._trained_by.describe` gives it."""
    trained_by = root.optional("trained_by")
    if trained_by is None:
        return
    for optimizer in trained_by.dict().at("optimizers").items():
        optimizer.dict().at("class").text()
        for group in optimizer.at("groups").items():
            for name in group.items():
                name.text()
    for scheduler in trained_by.at("lr_schedulers").items():
        scheduler.text()


def _check_frozen(root: Field) -> None:
    """Check what :meth:`.FrozenParameters.state` gave; names that the model lacks are ignored."""
    frozen = root.optional("frozen")
    if frozen is None:
        return
    for when in ("at_start", "at_save"):
        for name in frozen.dict().at(when).items():
            name.text()


def _check_counters(root: Field) -> None:
    fit = root.at("loops").dict().at("fit").dict()
    counts = {
        name: fit.at(name).count()
        for name in ("epoch", "batches_done", "global_step", "total_batches", "scheduler_steps")
    }
    fit.at("validated_at").count(-1)
    fit.at("epoch_done").flag()
    fit.at("elapsed").duration()
    fit.at("accumulate").count(1)
    global_batch = ("asked_accumulate", "batch_size", "step_size")
    if any(name in fit.value for name in global_batch):
        for name in global_batch:
            fit.at(name).count(1)
    for name, inside in (("epoch", "epoch"), ("global_step", "global_step")):
        if root.at(name).count() != counts[inside]:
            raise root.at(name).refuse(f"{counts[inside]}, as in 'loops/fit/{inside}'")
    if fit.value["validated_at"] > counts["total_batches"]:
        raise fit.at("validated_at").refuse(f"at most the {counts['total_batches']} of 'loops/fit/total_batches'")


def _check_results(results: Field) -> None:
    for name in ("callback_metrics", "progress_bar_metrics"):
        metrics = results.at(name).dict()
        for key, value in metrics.value.items():
            if not isinstance(key, str) or not (isinstance(value, int | float) or is_tensor(value)):
                raise metrics.refuse("a dict from names to numbers")
    ranks = list(results.at("ranks").items())
    if (leaders := results.optional("leaders")) is not None:
        led = [leader.flag() for leader in leaders.items()]
        if len(led) != len(ranks) or not any(led):
            raise leaders.refuse(
                f"a list of {len(ranks)} flags, as long as 'loops/results/ranks', with one that is True"
            )
    for rank in ranks:
        for stage in rank.dict().value:
            if stage not in _STAGES:
                raise rank.refuse(f"a dict with some of the stages {', '.join(_STAGES)}")
            for payload in rank.at(stage).items():
                _check_payload(payload.dict())


def _check_payload(payload: Field) -> None:
    """Check an accumulation that the end of the epoch reads; see ``_metric_payloads.pack``."""
    for name in ("name", "suffix"):
        payload.at(name).text()
    for name in ("both", "logger", "prog_bar", "wide", "sync"):
        payload.at(name).flag()
    if payload.at("reduction").text() not in (kinds := sorted(set(REDUCTIONS.values()))):
        raise payload.at("reduction").refuse(f"one of {', '.join(map(repr, kinds))}")
    for name in ("total", "weight"):
        if payload.at(name).value is not None:
            payload.at(name).number()
    if not isinstance(payload.at("metric").value, bool | str):
        raise payload.at("metric").refuse("True, False or a name")
    identity = payload.at("identity")
    parts = [part.value for part in identity.items()]
    if (
        len(parts) != 3
        or not all(isinstance(part, str) for part in parts[:2])
        or type(parts[2]) not in (int, type(None))
    ):
        raise identity.refuse("a name, a hook and the number of a loader or None")
    if (state := payload.optional("metric_state")) is not None and state.value is not None:
        state.dict()


def _check_ranks(ranks: Field) -> None:
    entries = list(ranks.items())
    if not entries:
        raise ranks.refuse("a list with one entry per rank")
    replicas = set()
    for entry in entries:
        entry.dict()
        _check_generators(entry.at("rng"))
        _check_position(entry.at("data"))
        if (share := entry.optional("share")) is not None:
            parts = [part.count() for part in share.items()]
            if len(parts) != 2 or not 0 <= parts[1] < parts[0] <= len(entries):
                raise share.refuse(f"how many replicas, up to {len(entries)}, and which of them")
            replicas.add(parts[0])
        if (size := entry.optional("batch_size")) is not None and size.value is not None:
            size.count(1)
    if len(replicas) > 1:
        raise ranks.refuse(f"of one number of replicas (got {', '.join(map(str, sorted(replicas)))})")


def _check_rank_states(root: Field) -> None:
    """Check the states that ranks have of their own, and who has written them."""
    writers = root.optional(STATES_KEY)
    if writers is None:
        return
    for kind in writers.dict().value:
        if kind not in ("precision", "strategy"):
            raise writers.refuse("a dict with some of the keys 'precision' and 'strategy'")
        writer, ranks = writers.at(kind).dict(), root.at("ranks")
        for name in ("class", "alias"):
            writer.at(name).text()
        if writer.at("world_size").count(1) != len(ranks.value):
            raise writer.at("world_size").refuse(f"{len(ranks.value)}, the number of entries in 'ranks'")
        for entry in ranks.items():
            for name in entry.at(kind).dict().value:
                if not isinstance(name, str):
                    raise entry.at(kind).refuse("a dict with names as keys")


def _check_generators(state: Field) -> None:
    """As :mod:`torchhal.rng` collects them; tried on temporary generators."""
    python = state.dict().at("python")
    if len(list(python.items())) != 3:
        raise python.refuse("a state of Python's generator")
    python.taken_by(
        lambda value: random.Random().setstate((value[0], tuple(value[1]), value[2])), "a state of Python's generator"
    )
    state.at("torch").taken_by(torch.Generator().set_state, "a state of torch's generator")
    if (numpy_state := state.optional("numpy")) is not None:
        if (
            len(list(numpy_state.items())) != 5 or numpy_state.at(2).count() > 624
        ):  # which NumPy accepts, and then reads out of bounds
            raise numpy_state.refuse("a state of NumPy's generator")
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy_state.taken_by(
                lambda value: numpy.random.RandomState().set_state(
                    (*value[:1], numpy.array(value[1], "uint32"), *value[2:])
                ),
                "a state of NumPy's generator",
            )
    if (device := state.optional("device")) is not None and not is_tensor(device.value):
        raise device.refuse("a state of a device's generator")
    if (kind := state.optional("device_type")) is not None:
        kind.text()


def _check_position(position: Field) -> None:
    """As :meth:`torchhal.trainer.data._training_data.TrainingData.position` gives it."""
    if position.value is None:
        return
    if position.dict().at("epoch_rng").value is not None:
        _check_generators(position.at("epoch_rng"))
    for name in ("generators_at_start", "generators"):
        _check_generator_list(position.at(name))
    for name in ("samples", "length"):
        if (length := position.optional(name)) is not None and length.value is not None:
            length.count()
    order = position.optional("order")
    if order is None or order.value is None:
        return
    if order.dict().at("seed").value is not None:
        order.at("seed").count()
    for name, minimum in (("start", 0), ("batches", 0), ("per_batch", 1)):
        order.at(name).count(minimum)
    order.at("draws_seed").flag()
    if (states := order.optional("rng")) is not None:
        _check_generators(states)
        _check_generator_list(order.at("generators"))


def _check_generator_list(states: Field) -> None:
    for state in states.items():
        if not is_tensor(state.value):
            raise state.refuse("a generator's state, a tensor")


def _short(value: Any) -> str:
    if is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}"
    return reprlib.repr(value)
