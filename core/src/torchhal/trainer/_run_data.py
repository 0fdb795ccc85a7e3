"""Load the training and validation data of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchhal._overrides import implements
from torchhal.errors import ModelError
from torchhal.trainer import _resume as resume
from torchhal.trainer.data._evaluation_data import EvaluationData
from torchhal.trainer.data._iterators import exhaust_sampler
from torchhal.trainer.data._loaders import as_loaders, find_loaders
from torchhal.trainer.data._training_data import TrainingData

if TYPE_CHECKING:
    from torchhal.trainer.run_state import RunState


def load_training_data(run: RunState, *, again: bool = False) -> TrainingData:
    """Return the run's training data, loading it where there is none yet.

    Args:
        run: a run whose ``setup`` hooks are over.
        again: get the loader from the model, the data module or the arguments once more.

    Raises:
        ModelError: there is no training loader, or it is not a loader.
    """
    progress = run.progress
    if progress.data is None or again:
        loader = find_loaders(run, "train", run.sources.train)
        if loader is None:
            raise ModelError("fit needs training data: the model's or data module's train_dataloader returned None")
        data, is_first = TrainingData(loader, run), progress.data is None
        if progress.data is not None:
            progress.data.close()
        progress.data = data
        if is_first:
            resume.choose_accumulation(run, data)
    return progress.data


def reload_data(run: RunState) -> None:
    """Get the loaders of the call that runs, of a fit those of training and validation, from their owners once more."""
    if run.state.fn != "fit":
        run.sources.evaluation_data.replace_by(
            load_evaluation_data(run, with_indices=run.sources.evaluation_data.with_indices)
        )
        return
    load_training_data(run, again=True)
    run.sources.validation_data.close()
    run.sources.validation_data = load_validation_data(run)


def load_evaluation_data(run: RunState, *, with_indices: bool = False) -> EvaluationData:
    """Return what validate, test or predict, whichever runs, goes through.

    Args:
        run: a run whose ``setup`` hooks are over.
        with_indices: record which samples each batch holds.

    Raises:
        ModelError: there is no loader, or it is not a loader.
    """
    fn = run.state.fn
    assert fn is not None
    given = find_loaders(run, fn, getattr(run.sources, fn))
    if not as_loaders(given):
        raise ModelError(f"{fn} needs data: its loader is {given!r}")
    name = "limit_val_batches" if fn == "validate" else f"limit_{fn}_batches"
    return EvaluationData.build(given, run, getattr(run, name), name, "dataloaders", with_indices=with_indices)


def load_validation_data(run: RunState) -> EvaluationData:
    """Return what a fit validates on; nothing where the model has no ``validation_step`` or the limit is no batch.

    Under ``overfit_batches`` the training loader replaces each validation loader.
    """
    module, given = run.module, run.sources.validate
    if not implements(module, "validation_step"):
        if given is not None:
            run.warn_once(f"{type(module).__name__} has no validation_step, so val_dataloaders is not used")
        return EvaluationData()
    if not (run.overfit_batches or run.limit_val_batches):
        return EvaluationData()
    found = find_loaders(run, "validate", given)
    if not run.overfit_batches:
        return EvaluationData.build(found, run, run.limit_val_batches, "limit_val_batches", "val_dataloaders")
    trained_on = load_training_data(run).given
    if isinstance(trained_on, Iterator) and as_loaders(found):
        raise ModelError(
            "'overfit_batches' validates on the training batches, in the midst of an epoch too, but a "
            f"{type(trained_on).__name__} can't be read a second time meanwhile: pass a DataLoader or a list, or no "
            "validation data"
        )
    same = [trained_on for _ in as_loaders(found)]
    limit = run.overfit_batches
    return EvaluationData.build(same, run, limit, "overfit_batches", "train_dataloaders", as_trained=True)


def reach_end_of_sampler(run: RunState, iterator: Any) -> None:
    """End an epoch whose batches are used up as a for loop does, unless the model's framework counts them instead."""
    if run.adapters.exhausts_samplers(run.module):
        exhaust_sampler(iterator)
