"""Make loggers and callbacks of the Trainer's arguments, and check the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from torchhal._overrides import implements
from torchhal.checkpoint._location import is_url
from torchhal.errors import ConfigurationError, ModelError
from torchhal.registry._hints import NAMES
from torchhal.trainer._hook_names import near_miss
from torchhal.trainer._run_adapters import Adapters
from torchhal.trainer.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from torchhal.trainer.loggers import CSVLogger
from torchhal.trainer.run import Run

_OF_LOGGERS = ("log_metrics", "version", "log_dir", "finalize")


def make_loggers(logger: Any, root: str) -> list[Any]:
    """``logger=``: True or None for the default one, False, one logger, or several."""
    if logger is True or logger is None:  # it can't append to a file at a URL, where checkpoints alone go
        return [CSVLogger(os.getcwd() if is_url(root) else root)]
    if logger is False:
        return []
    loggers = list(logger) if isinstance(logger, list | tuple) else [logger]
    for item in loggers:
        if isinstance(item, type) or not all(hasattr(item, name) for name in _OF_LOGGERS):
            meant = NAMES["TensorBoardLogger" if logger == "tensorboard" else "CSVLogger"]
            if isinstance(item, type) and all(hasattr(item, name) for name in _OF_LOGGERS):
                meant = item.__name__
            raise ConfigurationError(
                f"'logger' must be True, False, a logger or several (got {logger!r}): make an object, as {meant}(...)"
            )
    return loggers


_KINDS: Mapping[type, str] = {
    ModelCheckpoint: "checkpoint",
    ModelSummary: "model_summary",
    ProgressBar: "progress_bar",
}


def make_callbacks(
    callbacks: Any,
    adapters: Adapters,
    *,
    checkpointing: bool | None = None,
    progress_bar: bool = False,
    model_summary: bool = False,
    fast_dev_run: bool = False,
) -> list[Any]:
    """``callbacks=`` and the default ones that are switched on and not among them; checkpoints come last.

    ``adapters`` say which of the default ones a callback of another framework stands in for.

    Raises:
        ConfigurationError: what is no callback; a ModelCheckpoint where ``checkpointing`` was switched off (False).
    """
    if callbacks is None:
        chosen: list[Any] = []
    else:
        chosen = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in chosen:
        is_one = isinstance(callback, Callback) or hasattr(callback, "on_train_start")
        if isinstance(callback, type) or not (is_one or adapters.of(callback) is not None):
            make = f": make an object, {callback.__name__}(...)" if isinstance(callback, type) else ""
            raise ConfigurationError(f"'callbacks' must be a Callback or several (got {callback!r}){make}")
    if checkpointing is False and (savers := [c for c in chosen if _saves(c, adapters)]):
        raise ConfigurationError(
            f"'enable_checkpointing' is False, but 'callbacks' holds a {type(savers[0]).__name__}: leave one out"
        )
    for wanted, kind in ((model_summary, ModelSummary), (progress_bar, ProgressBar), (checkpointing, ModelCheckpoint)):
        given = (
            isinstance(callback, kind) or adapters.kind_of_callback(callback) == _KINDS[kind] for callback in chosen
        )
        if wanted and not any(given):
            chosen.append(kind())
    if fast_dev_run:  # nothing is kept of a trial run
        chosen = [callback for callback in chosen if not _saves(callback, adapters)]
    keys = [f"{each.state_key} in {each.dirpath}" for each in chosen if isinstance(each, ModelCheckpoint)]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigurationError(
            f"'callbacks' must not hold two ModelCheckpoints that differ in nothing (got {', '.join(sorted(twice))} "
            "twice): each would resume with the other's files"
        )
    savers = [callback for callback in chosen if _saves(callback, adapters)]
    return [callback for callback in chosen if callback not in savers] + savers


def _saves(callback: Any, adapters: Adapters) -> bool:
    return isinstance(callback, ModelCheckpoint) or adapters.kind_of_callback(callback) == "checkpoint"


def check_model(model: Any) -> Any:
    if not isinstance(model, nn.Module):
        raise ModelError(f"'model' must be a torch.nn.Module (got {model!r})")
    compiled = sys.modules.get("torch._dynamo")  # it costs seconds to import, and without it nothing is compiled
    if compiled is not None and isinstance(model, compiled.OptimizedModule):
        raise ModelError(
            f"'model' must be the {type(model._orig_mod).__name__} itself, not what torch.compile(model) made of it: "
            "its training_step would run uncompiled, and a checkpoint would name its weights '_orig_mod...'. "
            "Compile it in place, model.compile(...), and pass the model"
        )
    return model


def check_can_fit(run: Run, module: Any) -> None:
    """Refuse what can't train, before a process starts."""
    name = type(module).__name__
    for method, what in (
        ("training_step", "takes (batch, batch_idx) and returns the loss"),
        ("configure_optimizers", "returns the optimizer"),
    ):
        if not implements(module, method):
            other = near_miss(module, method)
            said = f" (its {other} is no hook, and never called)" if other else ""
            raise ModelError(f"{name} can't be fitted: it has no {method}{said}. Define one that {what}")
    if run.max_epochs == -1 and run.max_steps == -1 and run.max_time is None:
        run.warn_once("max_epochs=-1 and no max_steps or max_time: training runs until somebody stops it")
    if run.max_epochs is None and run.max_steps == -1 and run.max_time is None:
        raise ConfigurationError("'max_epochs', 'max_steps' or 'max_time' must be given")
