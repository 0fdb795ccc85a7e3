"""Save the state of a run as one dictionary of plain data, and restore it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchhal import rng
from torchhal._hyperparameters import NotPlainError, to_plain
from torchhal._overrides import implements
from torchhal._rank_state import STATES_KEY
from torchhal.checkpoint import CheckpointIO
from torchhal.checkpoint._inspection import is_tensor
from torchhal.checkpoint._trainer_format import FORMAT, RUN_KEY, check_dtypes, check_format, target_of
from torchhal.checkpoint.base import overrides_recognizes
from torchhal.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    DistributedError,
    TorchhalError,
)
from torchhal.resolve._checkpoint_ios import usable_ios
from torchhal.strategies._fused_optimizers import as_unfused
from torchhal.strategies._optimizer_state import parameters_without_state
from torchhal.trainer import _checkpoint_digests as checkpoint_digests
from torchhal.trainer import _rank_states as rank_states
from torchhal.trainer import _resume as resume
from torchhal.trainer._callback_states import callback_states, load_callback_states, unchanged_by_errors
from torchhal.trainer._checkpoint_fields import check_training_state, check_weights
from torchhal.trainer._frozen_parameters import KEY as FROZEN
from torchhal.trainer._trained_by import check_same
from torchhal.trainer.callbacks._checkpoint_files import is_filled
from torchhal.trainer.callbacks._checkpoint_records import runs_beside

if TYPE_CHECKING:
    from torchhal.trainer.run_state import RunState


def dump_checkpoint(run: RunState, *, weights_only: bool = False, alone: bool = False) -> dict[str, Any]:
    """Return the state between two batches.

    Called on every rank, since gathering it communicates; rank 0's is written.

    Args:
        run: a run whose model is set up.
        weights_only: only the weights and the counters, nothing to resume from.
        alone: called on this rank only, under a strategy whose ranks each have the whole state. Without communication,
            so without the strategy's own state, and what other ranks have of their own: their random numbers,
            half-finished averages and gradients.
    """
    from torchhal import __version__

    strategy, module = run.strategy, run.module
    checkpoint: dict[str, Any] = {
        "torchhal_version": __version__,
        "torchhal_format": FORMAT,
        "epoch": run.current_epoch,
        "global_step": run.global_step,
        "state_dict": strategy.module.state_dict() if alone and strategy.module else strategy.module_state_dict(),
        RUN_KEY: _describe(run),
    }
    for owner in (module, run.datamodule):
        if isinstance(getattr(owner, "hparams", None), Mapping) and owner.hparams:
            _dump_hparams(run, owner, checkpoint)
    if not weights_only:
        optimizer_states = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
        if run.fuses_optimizers:
            optimizer_states = list(map(as_unfused, optimizer_states))
        checkpoint["optimizer_states"] = optimizer_states
        checkpoint["lr_schedulers"] = [strategy.scheduler_state(config) for config in strategy.lr_scheduler_configs]
        if run.trained_by is not None:
            checkpoint["trained_by"] = run.trained_by
        if (frozen := run.frozen_parameters.state(run.module)) is not None:
            checkpoint[FROZEN] = frozen
        checkpoint["precision"] = strategy.precision.state_dict()
        checkpoint["strategy"] = {} if alone else strategy.state_dict()
        checkpoint["callbacks"] = callback_states(run.callbacks)
        fit = run.progress
        checkpoint["loops"] = {"fit": fit.state_dict(), "results": run.results.state_dict(alone=alone)}
        entry = {
            "rng": rng.collect(strategy.accelerator, strategy.root_device),
            "data": fit.data.position() if fit.data is not None else None,
            "share": list(resume.data_parallel_rank(run)),
            "batch_size": resume.batch_size(fit),
        }
        if alone:
            checkpoint["ranks"] = resume.entries_of_replicas(run, entry)
        else:
            _gather_ranks(run, entry, checkpoint)
        if fit.has_gradients and not alone:
            checkpoint["gradients"] = strategy.accumulated_gradients()
        datamodule = run.datamodule
        if datamodule is not None and hasattr(datamodule, "state_dict"):
            checkpoint[type(datamodule).__qualname__] = datamodule.state_dict()
    if (adapter := run.adapters.of(module)) is not None:
        adapter.on_save_checkpoint(checkpoint)
    for callback in run.callbacks:
        if implements(callback, "on_save_checkpoint"):
            run.adapters.bind_callback(callback, "on_save_checkpoint")(run.trainer, module, checkpoint)
    if implements(module, "on_save_checkpoint"):
        module.on_save_checkpoint(checkpoint)
    sharded = "sharded" in strategy.checkpoint_io.features
    if not weights_only and (sharded or alone or run.is_global_zero):
        checkpoint[checkpoint_digests.KEY] = checkpoint_digests.digests(checkpoint, sharded=sharded)
    return checkpoint


def _describe(run: RunState) -> dict[str, Any]:
    """Return what the run consists of, in names: no load depends on it, and whoever gets the file reads it."""
    strategy = run.strategy
    return {
        "torch": str(torch.__version__),
        "accelerator": strategy.accelerator.name,
        "strategy": strategy.display_name,
        "precision": strategy.precision.alias,
        "world_size": strategy.world_size,
        "model": target_of(type(run.module)),
        **({} if run.auto is None or run.auto.decision is None else {"auto": run.auto.decision}),
    }


def _gather_ranks(run: RunState, entry: dict[str, Any], checkpoint: dict[str, Any]) -> None:
    """Put the ``entry`` and the state of its own that each rank has into the checkpoint."""
    strategy = run.strategy
    own = rank_states.rank_states(strategy)
    entries = strategy.all_gather_object((entry, list(own)))
    checkpoint["ranks"] = [entry for entry, _ in entries]
    if any(kinds for _, kinds in entries):
        kinds = [kinds for _, kinds in entries]
        checkpoint[STATES_KEY] = rank_states.gather_rank_states(strategy, own, kinds, checkpoint["ranks"])


def _dump_hparams(run: RunState, owner: Any, checkpoint: dict[str, Any]) -> None:
    """Save the hyperparameters from which ``load_from_checkpoint`` recreates ``owner``, and the names of the others."""
    plain, objects = {}, {}
    for name, value in owner.hparams.items():
        try:
            plain[name] = to_plain(value)
        except NotPlainError as error:
            objects[name] = error.described(value)
    prefix = "datamodule_" if owner is run.datamodule else ""
    checkpoint[f"{prefix}hyper_parameters"] = plain
    if getattr(owner, "_hparams_name", None) is not None:  # all of them were passed in this one argument
        checkpoint[f"{prefix}hparams_name"] = owner._hparams_name
    if objects:
        checkpoint[f"{prefix}hparams_left_out"] = objects
        run.warn_once(
            f"hyperparameters {', '.join(f'{name!r} ({what})' for name, what in objects.items())} are or hold objects "
            "and are not saved in checkpoints: pass them "
            "to load_from_checkpoint, which asks for them, or leave them out with save_hyperparameters(ignore=[...])"
        )


def read_checkpoint(run: RunState, path: str) -> dict[str, Any]:
    """Load the checkpoint at ``path``, check it, and pass it to callbacks and module, which may change it.

    Nothing is restored yet: the module may still change its parameters.

    Raises:
        CheckpointCorruptError: a value differs from the saved one, or is invalid; the message names its field.
        CheckpointMismatchError: another library has written it, or it lacks what this run needs.
    """
    module, training = run.module, run.state.fn == "fit"
    checkpoint = run.strategy.load_checkpoint(path)
    if (adapter := run.adapters.of(module)) is not None:
        checkpoint = adapter.adapt_checkpoint(checkpoint, path)
    check_format(checkpoint, path)
    if training:
        checkpoint_digests.check_digests(checkpoint, path)
    check_weights(checkpoint, path)
    for callback in run.callbacks:
        if implements(callback, "on_load_checkpoint"):
            run.adapters.bind_callback(callback, "on_load_checkpoint")(run.trainer, module, checkpoint)
    if implements(module, "on_load_checkpoint"):
        module.on_load_checkpoint(checkpoint)
    if training and adapter is None and "current_model_state" in checkpoint:
        run.warn_once(
            f"{path!r} holds an average of the weights, and beside it those of training, which only a WeightAveraging "
            "callback continues from: without one the fit goes on with the average"
        )
    check_weights(checkpoint, path)
    if training:
        check_training_state(checkpoint, path)
    return checkpoint


def restore_datamodule(run: RunState, checkpoint: Mapping[str, Any], path: str) -> None:
    """Restore the data module's state, before any of its loaders is made: they may depend on it."""
    datamodule = run.datamodule
    if hasattr(datamodule, "load_state_dict") and (name := type(datamodule).__qualname__) in checkpoint:
        with _naming(path, name):
            datamodule.load_state_dict(checkpoint[name])


def check_fits(run: RunState, checkpoint: Mapping[str, Any], path: str) -> dict[str, Mapping[str, Any]]:
    """Raise CheckpointMismatchError where this run can't take the saved states of optimizers, schedulers or ranks.

    Nothing is restored yet.

    Returns:
        The per-rank states with which this rank continues, by the kind of their owner.
    """
    strategy = run.strategy
    source = "setup got" if run.by_hand else "configure_optimizers returned"
    _match(path, "optimizer_states", "optimizer", checkpoint, strategy.optimizers, source)
    _match(path, "lr_schedulers", "lr_scheduler", checkpoint, strategy.lr_scheduler_configs, source)
    check_same(checkpoint.get("trained_by"), run.trained_by, path, by_hand=run.by_hand)
    for index, (optimizer, state) in enumerate(zip(strategy.optimizers, checkpoint["optimizer_states"], strict=True)):
        try:
            with _naming(path, f"optimizer_states/{index}"):
                strategy.check_optimizer_state(optimizer, state)
                if checkpoint_digests.KEY not in checkpoint and (lost := parameters_without_state(optimizer, state)):
                    run.warn_once(
                        f"{path!r}, field 'optimizer_states/{index}': it has no state of the parameters numbered "
                        f"{', '.join(map(str, lost[:8]))}{' and others' if len(lost) > 8 else ''}, which begin without "
                        "one. If they had got gradients, continue from a checkpoint that was not edited"
                    )
        except CheckpointMismatchError:
            if problem := _other_weights(run, checkpoint, path):  # another model's: the weights explain more
                raise CheckpointMismatchError(problem) from None
            raise
    for index, (config, state) in enumerate(
        zip(strategy.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True)
    ):
        with _naming(path, f"lr_schedulers/{index}"):
            strategy.check_scheduler_state(config, state)
    with _naming(path, STATES_KEY):
        return rank_states.choose_rank_states(run, checkpoint, path)


def _other_weights(run: RunState, checkpoint: Mapping[str, Any], path: str) -> str:
    """Return how the weights differ from the model's in shapes or names; "" where they don't."""
    module, saved = run.strategy.module, checkpoint["state_dict"]
    own = {} if module is None else module.state_dict()
    differ = [
        f"{name!r} has the shape {tuple(saved[name].shape)} in the checkpoint and {tuple(value.shape)} here"
        for name, value in own.items()
        if is_tensor(value) and value.numel() and is_tensor(saved.get(name)) and saved[name].shape != value.shape
    ]  # an engine that has taken the elements of a parameter leaves an empty one in its place
    differ += [f"the checkpoint lacks {name!r}" for name in own if name not in saved]
    differ += [f"the model has no {name!r}" for name in saved if name not in own]
    if not differ:
        return ""
    return (
        f"{path!r}, field 'state_dict': the weights don't belong to {type(module).__name__}: {'; '.join(differ[:4])}"
        f"{' and others' if len(differ) > 4 else ''}"
    )


def restore_weights(run: RunState, checkpoint: dict[str, Any], path: str) -> None:
    """Restore the module's weights through the strategy that has set it up.

    For a fit, first restores the parts that only their owners can validate; on an error the callbacks are unchanged.
    """
    strategy, strict = run.strategy, getattr(run.module, "strict_loading", True)
    with unchanged_by_errors(run.callbacks):
        if run.state.fn == "fit":
            load_callback_states(run.callbacks, checkpoint["callbacks"], path)
            with _naming(path, "precision"):
                strategy.precision.load_state_dict(checkpoint["precision"])
            if "strategy" in checkpoint:
                with _naming(path, "strategy"):
                    strategy.load_state_dict(checkpoint["strategy"])
        if strategy.module is not None:
            check_dtypes(checkpoint["state_dict"], strategy.module, path)
        with _naming(path, "state_dict"):
            strategy.load_module_state_dict(checkpoint["state_dict"], strict=strict)


def restore_training(
    run: RunState, checkpoint: dict[str, Any], path: str, states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore everything else that a fit continues from: exact when the number of replicas is the same.

    ``states`` are the per-rank states that :func:`check_fits` returned.
    """
    strategy, fit = run.strategy, run.progress
    for index, (optimizer, state) in enumerate(zip(strategy.optimizers, checkpoint["optimizer_states"], strict=True)):
        with _naming(path, f"optimizer_states/{index}"):
            strategy.load_optimizer_state(optimizer, state)
    for index, (config, state) in enumerate(
        zip(strategy.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True)
    ):
        with _naming(path, f"lr_schedulers/{index}"):
            strategy.load_scheduler_state(config, state)
    for kind, state in states.items():
        with _naming(path, f"ranks/{strategy.global_rank}/{kind}"):
            rank_states.load_rank_state(strategy, kind, state)
    run.frozen_parameters.restore(checkpoint.get(FROZEN))
    loops = checkpoint["loops"]
    fit.load_state_dict(loops["fit"])
    with _naming(path, "loops/results"):
        run.results.load_state_dict(loops["results"])
    if checkpoint.get("gradients") is not None and resume.carries_accumulated_grads(run, checkpoint):
        with _naming(path, "gradients"):
            strategy.load_accumulated_gradients(checkpoint["gradients"])
        fit.has_gradients = True
    resume.restore_rank(run, checkpoint, path)


@contextmanager
def _naming(path: str, field: str) -> Iterator[None]:
    """Raise errors of the body as CheckpointMismatchError that name the checkpoint's path and the field."""
    try:
        yield
    except DistributedError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, TorchhalError) else f"{type(error).__name__}: {error}"
        raise CheckpointMismatchError(f"{path!r}, field {field!r}: {why}") from error


def _match(
    path: str, field: str, what: str, checkpoint: Mapping[str, Any], present: Sequence[Any], source: str
) -> None:
    if len(checkpoint[field]) != len(present):
        raise CheckpointMismatchError(
            f"{path!r} holds the state of {len(checkpoint[field])} {what}(s) in its field {field!r}, but {source} "
            f"{len(present)}"
        )


def last_checkpoint(run: RunState) -> str | None:
    """Return what ``ckpt_path="last"`` means: the newest complete checkpoint of this run's folders, or None.

    The folders are those of the Trainer's ModelCheckpoint callbacks; where one follows the logger into a folder
    per run (``version_N``), the newest earlier run that has a checkpoint.
    """
    return _newest(run, _last_folders(run))


def _last_folders(run: RunState) -> list[list[str]]:
    """List the checkpoints of each folder in which the last one is looked for, in the order of the saves."""
    io = run.strategy.checkpoint_io
    found: dict[str, list[str]] = {}
    for callback in run.checkpoint_callbacks:
        for folder in callback.candidate_folders(run.trainer):
            if folder in found:
                break
            if paths := io.list_checkpoints(folder):
                found[folder] = paths
                break
    return list(found.values())


def _newest(run: RunState, folders: list[list[str]]) -> str | None:
    return max((paths[-1] for paths in folders), key=run.strategy.checkpoint_io.saved_ns, default=None)


def newest_path(run: RunState) -> str | None:
    """Return the newest checkpoint where the callbacks look for the last one, as this rank sees it; None for none."""
    return _newest(run, _last_folders(run))


def _folders(run: RunState) -> str:
    return ", ".join(repr(callback.candidate_folders(run.trainer)[0]) for callback in run.checkpoint_callbacks)


def resolve_path(run: RunState, ckpt_path: Any) -> str | None:
    """Return the file that ``ckpt_path`` means: None, a path, "last" or "best"."""
    if ckpt_path is None:
        return None
    if ckpt_path == "best":
        if run.by_hand:
            raise ConfigurationError(
                "ckpt_path='best' is the Trainer's, whose ModelCheckpoint compares what it saves: pass setup the path, "
                "or 'last'"
            )
        callbacks = [callback for callback in run.checkpoint_callbacks if callback.best_model_path]
        if not callbacks:
            raise ConfigurationError(
                "ckpt_path='best' needs a fit with this Trainer whose ModelCheckpoint found a best one (a monitored "
                "value that is NaN is never the best); pass a path, or fit first"
            )
        return str(callbacks[0].best_model_path)
    if ckpt_path == "last":
        if not run.checkpoint_callbacks:
            raise ConfigurationError("ckpt_path='last' needs a ModelCheckpoint callback, which knows the folder")
        # rank 0's result for all, as the ranks' views of the folder may differ
        folders = _last_folders(run)
        path: str | None = run.strategy.broadcast(_newest(run, folders))
        if path is not None:
            _refuse_several_runs(run, path, [*itertools.chain(*folders)])
        if path is None:
            _refuse_others(run, [callback.candidate_folders(run.trainer) for callback in run.checkpoint_callbacks])
        if path is None and run.state.fn != "fit":
            raise ConfigurationError(
                f"ckpt_path='last' needs a checkpoint, and there is none in {_folders(run)}: pass a path, or None "
                f"to {run.state.fn} the model as it is"
            )
        if path is None:
            run.warn_once("ckpt_path='last': there is no checkpoint yet, so training starts from the beginning")
        return path
    path = str(os.fspath(ckpt_path))
    _refuse_other(run, path)
    return path


def _refuse_other(run: RunState, path: str) -> None:
    """Raise CheckpointError, on every rank, for a checkpoint that another IO than the run's has written.

    One that the run's own IO recognises is left to its load, which says whether it is damaged.
    """
    problem = None
    io = run.strategy.checkpoint_io
    if run.is_global_zero and not (io.recognizes(path) if overrides_recognizes(io) else io.exists(path)):
        problem = next((_of_other(alias, path) for alias, other in _others(run) if other.recognizes(path)), None)
    _raise_everywhere(run, problem)


def _refuse_others(run: RunState, folders: list[list[str]]) -> None:
    """Raise the same for the newest checkpoint in each callback's first folder that has one."""
    problem = None
    own = run.strategy.checkpoint_io
    # Without anything there no IO is asked, as that would import every plugin at each first start.
    filled = [folder for some in folders for folder in some if is_filled(folder, own.storage_options)]
    if run.is_global_zero and filled:
        for alias, io in _others(run):
            listed = [io.list_checkpoints(folder) for folder in filled]
            paths = [[path for path in some if io.recognizes(path) and not own.recognizes(path)] for some in listed]
            for path in (found[-1] for found in paths if found):
                problem = problem or _of_other(alias, path)
    _raise_everywhere(run, problem)


def _others(run: RunState) -> list[tuple[str, CheckpointIO]]:
    own = type(run.strategy.checkpoint_io)
    return [(entry.component.alias, io) for entry, io in usable_ios() if type(io) is not own]


def _of_other(alias: str, path: str) -> str:
    return (
        f"{path!r} was written by checkpoint IO {alias!r}, and this run's is another: pass plugins=[{alias!r}] to the "
        "Trainer, or write one portable file with `torchhal checkpoint consolidate`"
    )


def _refuse_several_runs(run: RunState, newest: str, paths: list[str]) -> None:
    """Raise ConfigurationError, on every rank, where another run saved beside the one that saved ``newest``.

    Which of them to continue is ambiguous.
    """
    problem = None
    if run.is_global_zero:
        io = run.strategy.checkpoint_io
        if others := runs_beside(newest, paths, io.saved_ns, io.storage_options):
            problem = (
                "ckpt_path='last' must mean a checkpoint of one run, and several runs saved at the same time in "
                f"{', '.join(map(repr, sorted({*map(os.path.dirname, (newest, *others))})))}. The newest of each: "
                f"{', '.join(map(repr, (newest, *others)))}. Name the one to go on from, ckpt_path=PATH, and give each "
                "run a folder of its own, ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)"
            )
    _raise_everywhere(run, problem, ConfigurationError)


def _raise_everywhere(run: RunState, problem: str | None, kind: type[TorchhalError] = CheckpointError) -> None:
    if (problem := run.strategy.broadcast(problem)) is not None:
        raise kind(problem)
