"""Copy what a fit trains to the meta device, with its optimizers and a batch, to measure a step before the set-up."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from torchhal._overrides import implements
from torchhal.errors import FakeStepError, ModelError
from torchhal.memory_estimate import ModelMemory
from torchhal.precision import Precision
from torchhal.rng import host_generators_restored
from torchhal.strategies._optimizer_trials import copy_optimizer
from torchhal.trainer._configure_optimizers import configure_optimizers
from torchhal.trainer._fake_copy import FakeCopy
from torchhal.trainer._resume import data_parallel_rank
from torchhal.trainer._trial import make_trial
from torchhal.trainer.callbacks._meta_copy import measure
from torchhal.trainer.data._loaders import find_loaders, loader_length
from torchhal.trainer.planning._first_batch import first_batch, is_divided, is_repeatable
from torchhal.trainer.run_state import RunState

BATCHES = 1000
"""Of an epoch, as far as the length of a schedule depends on it, which doesn't change what memory a step takes."""


@dataclass(frozen=True)
class TrainedModel:
    """What a step is measured with.

    Attributes:
        memory: the model and its optimizers, on the meta device.
        batch: of one rank, as the loader gives it; None where it is not known.
        make: returns a copy of the model with values, and its optimizers; None where a step of it can't be taken.
        why_unknown: why no step is known; "" where one is.
        most_samples: those that one rank's share of the data has; None where that is not known.
        is_repeatable: whether batches that are taken before the fit are in it, too.
        is_divided: whether torchhal makes each rank's share of the data.
    """

    memory: ModelMemory
    batch: Any
    make: Callable[[], tuple[Any, Any]] | None
    why_unknown: str = ""
    most_samples: int | None = None
    is_repeatable: bool = False
    is_divided: bool = False


class CountedBatches(NamedTuple):
    """The fields of ``TrainingData`` that give a model the length of its training."""

    loader: range = range(BATCHES)
    length: int = BATCHES
    whole_length: int = BATCHES


def copy_for_planning(run: RunState, precision: Precision) -> TrainedModel:
    """Return the model of ``run``, which is not set up; it, its data and the random numbers stay as they are.

    Args:
        run: of a fit, on rank 0, after the hooks ``prepare_data`` and ``setup``.
        precision: that no run uses.

    Raises:
        Exception: what hooks of the model or the data raise on a copy that has no values.
    """
    with host_generators_restored():
        return _copy_by_hand(run, precision) if run.by_hand else _copy_module(run, precision)


def _copy_module(run: RunState, precision: Precision) -> TrainedModel:
    lengths = {name: getattr(run, name) for name in ("max_epochs", "max_steps")}  # of which schedules are made
    stand_in = make_trial(run.trainer, **lengths)
    counted: Any = CountedBatches()
    stand_in._run.state.fn, stand_in._run.progress.data = "fit", counted
    module: Any = FakeCopy(torch.device("meta"), {}).module(run.module)
    own = hasattr(type(module), "trainer")
    stand_in._run.module, stand_in._run.datamodule = module, run.datamodule
    if own:
        module.trainer = stand_in._run.adapters.trainer_for(module)
    if implements(module, "configure_model"):
        with torch.device("meta"):
            module.configure_model()
    module = precision.convert_module(module.to("meta"))
    if not implements(module, "configure_optimizers"):
        raise ModelError(f"{type(module).__name__} has no configure_optimizers")
    unknown = ""
    try:
        optimizers, _ = configure_optimizers(module)
    except Exception as error:
        optimizers = [torch.optim.AdamW(module.parameters())]
        unknown = f"configure_optimizers can't be called without values ({type(error).__name__}: {error}): by AdamW"
    stand_in.strategy.optimizers = list(optimizers)
    loader, batch, reason = _batch(run)
    reason = unknown or reason

    def make() -> tuple[Any, Sequence[Optimizer]]:
        real = copy.deepcopy(run.module)
        if own:
            real.trainer = stand_in._run.adapters.trainer_for(real)
        if implements(real, "configure_model"):
            real.configure_model()
        real = copy.deepcopy(precision).convert_module(real)
        made = configure_optimizers(real)[0]
        stand_in.strategy.optimizers = list(map(weakref.proxy, made))  # or their state would stay on the device
        return real, made

    samples = loader_length(getattr(loader, "dataset", None))
    most = None if samples is None else max(1, samples // data_parallel_rank(run)[0])
    memory = measure(module, optimizers)
    return TrainedModel(
        memory, batch, None if reason else make, reason, most, is_repeatable(loader), is_divided(loader)
    )


def _batch(run: RunState) -> tuple[Any, Any, str]:
    """Return the training loader, a batch of it, and why there is none."""
    loader = None
    try:
        loader = find_loaders(run, "train", run.sources.train)
        return loader, first_batch(loader), ""
    except Exception as error:
        return loader, None, f"no batch of the training data is known ({type(error).__name__}: {error})"


def _copy_by_hand(run: RunState, precision: Precision) -> TrainedModel:
    """Return the models of a loop, whose step is what its model computes of a batch, and the mean of that."""
    found = run.trainer.found
    copier = FakeCopy(torch.device("meta"), {})
    module = precision.convert_module(copier.module(found.module))
    optimizers = [copy_optimizer(optimizer, copier.twins) for optimizer in found.optimizers]
    for optimizer in optimizers:
        optimizer.state.clear()
    batch, reason = None, "the step of a loop with several models is not known"
    if list(found.models) == [""]:
        _, batch, reason = _batch(run)
        vars(module)["training_step"] = MethodType(_step_by_hand, module)
    return TrainedModel(measure(module, optimizers), batch, None, reason)


def _step_by_hand(module: nn.Module, batch: Any) -> torch.Tensor:
    """Stand for the step of a loop: the model called with the batch, and the loss that it returns, or a mean."""
    found = _call(module, batch)
    loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    values = found.to_tuple() if hasattr(found, "to_tuple") else tree_leaves(found)
    losses = [value.mean() for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    if not losses:
        raise FakeStepError("what the model returns for a batch has no gradient")
    return torch.stack([loss.float() for loss in losses]).sum()


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    if not isinstance(batch, list | tuple):
        return module(batch)
    parameters = list(inspect.signature(module.forward).parameters.values())
    several = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in several if each.default is each.empty]
    return module(*batch[: max(1, len(needed))])
