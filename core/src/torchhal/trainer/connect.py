"""From the Trainer's arguments to loggers, callbacks and data."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchhal.checkpoint.place import is_url
from torchhal.errors import ConfigurationError, ModelError
from torchhal.trainer.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from torchhal.trainer.data import LOADER_HOOKS, EvaluationData
from torchhal.trainer.loggers import CSVLogger


@dataclass
class Attachments:
    """The loaders as given to one call, and what became of them."""

    train: Any = None
    validate: Any = None
    test: Any = None
    predict: Any = None
    keep_predictions: bool = True
    asked_for_callbacks: Any = None
    """The model whose ``configure_callbacks`` are among the Trainer's callbacks."""
    ready: bool = False
    """Whether all ``setup`` hooks have run, so that loaders may be asked for."""
    validation_data: EvaluationData = field(default_factory=EvaluationData)
    evaluation_data: EvaluationData = field(default_factory=EvaluationData)


def make_loggers(logger: Any, root: str) -> list[Any]:
    """``logger=``: True, False or None, one logger, or several."""
    if logger is True:  # it can't append to a file at a URL, where checkpoints alone go
        return [CSVLogger(os.getcwd() if is_url(root) else root)]
    if logger in (False, None):
        return []
    loggers = list(logger) if isinstance(logger, list | tuple) else [logger]
    for item in loggers:
        if not all(hasattr(item, name) for name in ("log_metrics", "version", "log_dir", "finalize")):
            raise ConfigurationError(f"'logger' must be True, False, a logger or several (got {logger!r})")
    return loggers


def make_callbacks(
    callbacks: Any,
    *,
    checkpointing: bool = False,
    progress_bar: bool = False,
    model_summary: bool = False,
    fast_dev_run: bool = False,
) -> list[Any]:
    """``callbacks=`` and the default ones that are switched on and not among them; checkpoints come last."""
    if callbacks is None:
        chosen: list[Any] = []
    else:
        chosen = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in chosen:
        if isinstance(callback, type) or not (isinstance(callback, Callback) or hasattr(callback, "on_train_start")):
            raise ConfigurationError(f"'callbacks' must be a Callback or several (got {callback!r})")
    for wanted, kind in ((model_summary, ModelSummary), (progress_bar, ProgressBar), (checkpointing, ModelCheckpoint)):
        if wanted and not any(isinstance(callback, kind) for callback in chosen):
            chosen.append(kind())
    if fast_dev_run:  # nothing is kept of a trial run
        chosen = [callback for callback in chosen if not isinstance(callback, ModelCheckpoint)]
    keys = [str(callback.state_key) for callback in chosen if isinstance(callback, ModelCheckpoint)]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigurationError(
            f"'callbacks' must not hold two ModelCheckpoints that differ in nothing (got {', '.join(sorted(twice))} "
            "twice): each would resume with the other's files"
        )
    savers = [callback for callback in chosen if isinstance(callback, ModelCheckpoint)]
    return [callback for callback in chosen if callback not in savers] + savers


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


def check_no_second(datamodule: Any, name: str, given: Any) -> None:
    if datamodule is not None and given is not None:
        raise ConfigurationError(
            f"'{name}' and 'datamodule' both give data: pass one of them (got {given!r} and {datamodule!r})"
        )


def find_source(model: Any, datamodule: Any, stage: str, given: Any) -> Any:
    """Whoever would give the loaders of ``stage``, without asking for them yet."""
    if given is not None:
        return given
    for owner in (datamodule, model):
        if callable(getattr(owner, LOADER_HOOKS[stage], None)):
            return owner
    return None
