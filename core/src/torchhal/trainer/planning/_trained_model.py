"""Copy what a fit trains to the meta device, with its optimizers and a batch, to measure a step before the set-up."""

from __future__ import annotations

import copy
import inspect
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
from torchhal.trainer.data._loaders import LOADER_HOOKS, loader_length
from torchhal.trainer.planning._first_batch import first_batch
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
    """

    memory: ModelMemory
    batch: Any
    make: Callable[[], tuple[Any, Any]] | None
    why_unknown: str = ""
    most_samples: int | None = None


class CountedBatches(NamedTuple):
    """The fields of ``TrainingData`` that give a model the length of its training."""

    loader: range = range(BATCHES)
    length: int = BATCHES
    whole_length: int = BATCHES


def copy_for_planning(run: RunState, precision: Precision) -> TrainedModel:
    """Return the model of ``run``, which is not set up; it, its data and the random numbers stay as they are.

    Args:
        run: of a fit, on rank 0.
        precision: that no run uses.

    Raises:
        Exception: what hooks of the model or the data raise on a copy that has no values.
    """
    with host_generators_restored():
        return _copy_by_hand(run, precision) if run.by_hand else _copy_module(run, precision)


def _copy_module(run: RunState, precision: Precision) -> TrainedModel:
    stand_in = make_trial(run.trainer)
    counted: Any = CountedBatches()
    stand_in._run.state.fn, stand_in._run.progress.data = "fit", counted
    datamodule = copy.copy(run.datamodule)
    module: Any = FakeCopy(torch.device("meta"), {}).module(run.module)
    own = hasattr(type(module), "trainer")
    stand_in._run.module, stand_in._run.datamodule = module, datamodule
    if own:
        module.trainer = stand_in._run.adapters.trainer_for(module)
    if datamodule is not None:
        datamodule.trainer = stand_in._run.adapters.trainer_for(datamodule)
    if run.sources.train is None:
        for owner in (datamodule, module):
            if implements(owner, "prepare_data"):
                owner.prepare_data()
    if datamodule is not None and run.sources.train is None and implements(datamodule, "setup"):
        datamodule.setup("fit")
    with torch.device("meta"):
        if implements(module, "setup"):
            module.setup("fit")
        if implements(module, "configure_model"):
            module.configure_model()
    module = precision.convert_module(module.to("meta"))
    if not implements(module, "configure_optimizers"):
        raise ModelError(f"{type(module).__name__} has no configure_optimizers")
    optimizers, _ = configure_optimizers(module)
    loader, batch, reason = _batch(run, module, datamodule)

    def make() -> tuple[Any, Sequence[Optimizer]]:
        real = copy.deepcopy(run.module)
        if own:
            real.trainer = stand_in._run.adapters.trainer_for(real)
        if implements(real, "setup"):
            real.setup("fit")
        if implements(real, "configure_model"):
            real.configure_model()
        real = copy.deepcopy(precision).convert_module(real)
        return real, configure_optimizers(real)[0]

    samples = loader_length(getattr(loader, "dataset", None))
    most = None if samples is None else max(1, samples // data_parallel_rank(run)[0])
    return TrainedModel(measure(module, optimizers), batch, None if reason else make, reason, most)


def _batch(run: RunState, module: Any, datamodule: Any) -> tuple[Any, Any, str]:
    """Return the training loader, a batch of it, and why there is none."""
    loader = run.sources.train
    hook = LOADER_HOOKS["train"]
    try:
        for owner in (datamodule, module):
            if loader is None and implements(owner, hook):
                loader = run.adapters.adapt_loaders(run.module, "train", getattr(owner, hook)())
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
        _, batch, reason = _batch(run, module, None)
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
