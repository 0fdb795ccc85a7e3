"""A training run as one dictionary of plain data, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchhal.checkpoint import CheckpointIO
from torchhal.errors import CheckpointError, CheckpointMismatchError, ConfigurationError
from torchhal.resolve.checkpoint_ios import usable_ios
from torchhal.trainer import replicas, rng

if TYPE_CHECKING:
    from torchhal.trainer.trainer import Trainer

FORMAT = 1


def dump_checkpoint(trainer: Trainer, *, weights_only: bool = False) -> dict[str, Any]:
    """The state between two batches. Called on every rank, since gathering it communicates; rank 0's is written.

    Args:
        trainer: a Trainer whose model is set up.
        weights_only: only the weights and the counters, nothing to resume from.
    """
    from torchhal import __version__

    strategy, module = trainer.strategy, trainer.module
    checkpoint: dict[str, Any] = {
        "torchhal_version": __version__,
        "torchhal_format": FORMAT,
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": strategy.module_state_dict(),
    }
    for owner, key, name_key in (
        (module, "hyper_parameters", "hparams_name"),
        (trainer.datamodule, "datamodule_hyper_parameters", "datamodule_hparams_name"),
    ):
        hparams = getattr(owner, "hparams", None)
        if isinstance(hparams, Mapping) and hparams:
            checkpoint[key] = _plain_hparams(trainer, hparams)
            if getattr(owner, "_hparams_name", None) is not None:  # all of them came in this one argument
                checkpoint[name_key] = owner._hparams_name
    if not weights_only:
        checkpoint["optimizer_states"] = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
        checkpoint["lr_schedulers"] = [strategy.scheduler_state(config) for config in strategy.lr_scheduler_configs]
        checkpoint["precision"] = strategy.precision.state_dict()
        checkpoint["callbacks"] = callback_states(trainer)
        fit = trainer.fit_loop
        checkpoint["loops"] = {"fit": fit.state_dict(), "results": trainer.results.state_dict()}
        checkpoint["ranks"] = strategy.all_gather_object(
            {
                "rng": rng.collect(strategy.accelerator, strategy.root_device),
                "data": fit.data.position() if fit.data is not None else None,
                "share": list(replicas.share_of_data(trainer)),
                "batch_size": replicas.batch_size(fit),
            }
        )
        if fit.optimization is not None and fit.optimization.has_gradients:
            checkpoint["gradients"] = strategy.accumulated_gradients()
        datamodule = trainer.datamodule
        if datamodule is not None and hasattr(datamodule, "state_dict"):
            checkpoint[type(datamodule).__qualname__] = datamodule.state_dict()
    for callback in trainer.callbacks:
        hook = getattr(callback, "on_save_checkpoint", None)
        if hook is not None:
            hook(trainer, module, checkpoint)
    if hasattr(module, "on_save_checkpoint"):
        module.on_save_checkpoint(checkpoint)
    return checkpoint


def callback_states(trainer: Trainer) -> dict[str, Any]:
    """``{state_key: state}`` of the callbacks that keep one."""
    states = {}
    for callback in trainer.callbacks:
        state = callback.state_dict() if hasattr(callback, "state_dict") else None
        if state:
            states[_state_key(callback)] = state
    return states


def load_callback_states(trainer: Trainer, states: Mapping[str, Any]) -> None:
    for callback in trainer.callbacks:
        state = states.get(_state_key(callback))
        if state is not None:
            callback.load_state_dict(state)


def _state_key(callback: Any) -> str:
    return str(getattr(callback, "state_key", type(callback).__qualname__))


def _plain_hparams(trainer: Trainer, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a ``weights_only`` load reads back; the names of others are said once."""
    plain = {name: value for name, value in hparams.items() if _is_plain(value)}
    if lost := [name for name in hparams if name not in plain]:
        trainer.warn_once(
            f"hyperparameters {', '.join(map(repr, lost))} are objects and are not saved in checkpoints: leave them "
            "out with save_hyperparameters(ignore=[...]), and pass them to load_from_checkpoint"
        )
    return plain


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.Tensor | torch.dtype):
        return type(value).__module__ in ("builtins", "torch") or isinstance(value, torch.Tensor)
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    return type(value) is dict and all(_is_plain(key) and _is_plain(item) for key, item in value.items())


def show_checkpoint(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> None:
    """Let callbacks and module see what is about to be loaded, while the module may still change its parameters."""
    module = trainer.module
    if "state_dict" not in checkpoint:
        raise CheckpointMismatchError(
            f"{path!r} is no checkpoint of a Trainer: it has no 'state_dict' (it has "
            f"{', '.join(map(str, list(checkpoint)[:8]))})"
        )
    for callback in trainer.callbacks:
        hook = getattr(callback, "on_load_checkpoint", None)
        if hook is not None:
            hook(trainer, module, checkpoint)
    if hasattr(module, "on_load_checkpoint"):
        module.on_load_checkpoint(checkpoint)


def restore_weights(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> None:
    """The module's weights, through the strategy that has set it up."""
    module = trainer.module
    strict = getattr(module, "strict_loading", True)
    try:
        trainer.strategy.load_module_state_dict(checkpoint["state_dict"], strict=strict)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{path!r}: {error}") from error


def restore_training(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> None:
    """Everything else a fit continues from: exact when the number of replicas is the same."""
    strategy, fit = trainer.strategy, trainer.fit_loop
    if "optimizer_states" not in checkpoint or "loops" not in checkpoint:
        raise CheckpointMismatchError(
            f"{path!r} holds weights only, so training can't continue from it: load them into the model "
            "(load_from_checkpoint) and fit without ckpt_path"
        )
    _match(path, "optimizer", checkpoint["optimizer_states"], strategy.optimizers)
    for optimizer, state in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=True):
        strategy.load_optimizer_state(optimizer, state)
    _match(path, "lr_scheduler", checkpoint["lr_schedulers"], strategy.lr_scheduler_configs)
    for config, state in zip(strategy.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
        strategy.load_scheduler_state(config, state)
    strategy.precision.load_state_dict(checkpoint["precision"])
    load_callback_states(trainer, checkpoint["callbacks"])
    loops = checkpoint["loops"]
    fit.load_state_dict(loops["fit"])
    trainer.results.load_state_dict(loops["results"])
    if checkpoint.get("gradients") is not None and replicas.keeps_gradients(trainer, checkpoint):
        strategy.load_accumulated_gradients(checkpoint["gradients"])
        fit.restored_gradients = True
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in checkpoint:
        datamodule.load_state_dict(checkpoint[type(datamodule).__qualname__])
    replicas.restore_rank(trainer, checkpoint, path)


def _match(path: str, what: str, saved: list[Any], present: list[Any]) -> None:
    if len(saved) != len(present):
        raise CheckpointMismatchError(
            f"{path!r} holds the state of {len(saved)} {what}(s), but configure_optimizers returned {len(present)}"
        )


def last_checkpoint(trainer: Trainer) -> str | None:
    """What ``ckpt_path="last"`` means: the newest complete checkpoint of this run's folders, or None.

    The folders are those of the Trainer's ModelCheckpoint callbacks; where one follows the logger into a folder
    per run (``version_N``), the newest earlier run that has a checkpoint.
    """
    io = trainer.strategy.checkpoint_io
    found: list[tuple[float, str]] = []
    for callback in trainer.checkpoint_callbacks:
        for folder in callback.candidate_folders(trainer):
            paths = io.list_checkpoints(folder)
            if paths:
                newest = paths[-1]
                found.append((os.path.getmtime(newest) if os.path.exists(newest) else 0.0, newest))
                break
    return max(found)[1] if found else None


def _folders(trainer: Trainer) -> str:
    return ", ".join(repr(callback.candidate_folders(trainer)[0]) for callback in trainer.checkpoint_callbacks)


def resolve_path(trainer: Trainer, ckpt_path: Any) -> str | None:
    """The file that ``ckpt_path`` means: None, a path, "last" or "best"."""
    if ckpt_path is None:
        return None
    if ckpt_path == "best":
        callbacks = [callback for callback in trainer.checkpoint_callbacks if callback.best_model_path]
        if not callbacks:
            raise ConfigurationError(
                "ckpt_path='best' needs a fit with this Trainer whose ModelCheckpoint found a best one (a monitored "
                "value that is NaN is never the best); pass a path, or fit first"
            )
        return str(callbacks[0].best_model_path)
    if ckpt_path == "last":
        if not trainer.checkpoint_callbacks:
            raise ConfigurationError("ckpt_path='last' needs a ModelCheckpoint callback, which knows the folder")
        # one answer, even if the ranks' views of the folder differ
        path: str | None = trainer.strategy.broadcast(last_checkpoint(trainer))
        if path is None:
            _refuse_others(trainer, [callback.candidate_folders(trainer) for callback in trainer.checkpoint_callbacks])
        if path is None and trainer.state.fn != "fit":
            raise ConfigurationError(
                f"ckpt_path='last' needs a checkpoint, and there is none in {_folders(trainer)}: pass a path, or None "
                f"to {trainer.state.fn} the model as it is"
            )
        if path is None:
            trainer.warn_once("ckpt_path='last': there is no checkpoint yet, so training starts from the beginning")
        return path
    path = str(os.fspath(ckpt_path))
    _refuse_other(trainer, path)
    return path


def _refuse_other(trainer: Trainer, path: str) -> None:
    """Raise CheckpointError, on every rank, for a checkpoint that another IO than the run's has written."""
    problem = None
    if trainer.is_global_zero and not trainer.strategy.checkpoint_io.exists(path):
        problem = next((_of_other(alias, path) for alias, io in _others(trainer) if io.exists(path)), None)
    _raise_everywhere(trainer, problem)


def _refuse_others(trainer: Trainer, folders: list[list[str]]) -> None:
    """The same, for the newest in the first of each callback's folders that has any."""
    problem = None
    if trainer.is_global_zero:
        for alias, io in _others(trainer):
            for path in (found[-1] for some in folders for folder in some if (found := io.list_checkpoints(folder))):
                problem = problem or _of_other(alias, path)
    _raise_everywhere(trainer, problem)


def _others(trainer: Trainer) -> list[tuple[str, CheckpointIO]]:
    own = type(trainer.strategy.checkpoint_io)
    return [(entry.component.alias, io) for entry, io in usable_ios() if type(io) is not own]


def _of_other(alias: str, path: str) -> str:
    return (
        f"{path!r} was written by checkpoint IO {alias!r}, and this run's is another: pass plugins=[{alias!r}] to the "
        "Trainer, or write one portable file with `torchhal checkpoint consolidate`"
    )


def _raise_everywhere(trainer: Trainer, problem: str | None) -> None:
    if (problem := trainer.strategy.broadcast(problem)) is not None:
        raise CheckpointError(problem)
