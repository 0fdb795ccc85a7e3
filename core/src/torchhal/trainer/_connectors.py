"""Make loggers and callbacks of the Trainer's arguments, and check the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from torchhal import registry
from torchhal._overrides import implements
from torchhal.checkpoint._location import is_url
from torchhal.errors import ConfigurationError, ModelError, message_of
from torchhal.registry import RegistryEntry
from torchhal.registry._hints import NAMES
from torchhal.resolve._alias_options import read_alias
from torchhal.resolve._user_arguments import from_alias, from_entry
from torchhal.trainer._hook_names import near_miss
from torchhal.trainer._run_adapters import Adapters
from torchhal.trainer.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from torchhal.trainer.loggers import CSVLogger
from torchhal.trainer.run_state import RunState

_OF_LOGGERS = ("log_metrics", "version", "log_dir", "finalize")


def make_loggers(logger: Any, root: str, defaults: Sequence[RegistryEntry] = (), *, notes: list[str]) -> list[Any]:
    """``logger=``: True or None for a CSVLogger, False, a logger, an alias with or without options, or several.

    Args:
        logger: as above.
        root: the Trainer's folder, in which a logger that is made by alias writes where its options say nothing else.
        defaults: those of plugins, which are added to what is given, unless it has one of that class; not to False.
        notes: gets a line for each of ``defaults`` that can't be used.

    Raises:
        ConfigurationError: what is no logger; options that its class doesn't take; one that can't be used here.
        UnknownAliasError: an alias that nothing provides.
    """
    if logger is False:
        return []
    root = os.getcwd() if is_url(root) else root  # no logger can append to a file at a URL, where checkpoints alone go
    is_default = logger is True or logger is None
    given = [CSVLogger(root)] if is_default else [_logger(item, root) for item in _several(logger)]
    return [*given, *_of_plugins(defaults, given, notes, save_dir=root)]


def _several(value: Any) -> list[Any]:
    is_one = isinstance(value, str) or not isinstance(value, Sequence)
    return [value] if is_one else list(value)


def _logger(item: Any, root: str) -> Any:
    named = read_alias("logger", item)
    if isinstance(named, str):
        return from_alias("logger", named, "given by the user", save_dir=root).value
    if isinstance(item, type) or not all(hasattr(item, name) for name in _OF_LOGGERS):
        is_class = isinstance(item, type) and all(hasattr(item, name) for name in _OF_LOGGERS)
        raise ConfigurationError(
            f"'logger' must be True, False, a logger, an alias or several of them (got {item!r}): write an alias, one "
            f"of {', '.join(map(repr, registry.aliases('logger')))}, or make an object, as "
            f"{item.__name__ if is_class else NAMES['CSVLogger']}(...)"
        )
    return item


def _of_plugins(entries: Sequence[RegistryEntry], given: Sequence[Any], notes: list[str], **offered: Any) -> list[Any]:
    """Return what plugins add to every run, without that of a class of which something is ``given``.

    The run did not ask for it, so a default that can't be used ends in a line of ``notes``.
    """
    made = []
    for entry in entries:
        try:
            if entry.availability() and any(type(part) is entry.load() for part in given):
                continue
            made.append(from_entry(entry, entry.qualified_name, "a default", **offered).value)
        except Exception as error:
            notes.append(f"this run goes without {entry}: {message_of(error)}")
    return made


def make_callbacks(
    callbacks: Any,
    adapters: Adapters,
    *,
    checkpointing: bool | None = None,
    progress_bar: bool = False,
    model_summary: bool = False,
    fast_dev_run: bool = False,
    defaults: Sequence[RegistryEntry] = (),
    notes: list[str],
) -> list[Any]:
    """``callbacks=``, those of plugins, and the ones that are switched on and not among them; checkpoints come last.

    ``adapters`` say which of the ones to switch on a callback of another framework stands in for; ``defaults`` are
    those of plugins, added where no callback of the class is given; ``notes`` get a line for each that can't be used.

    Raises:
        ConfigurationError: what is no callback; options that its class doesn't take; one that can't be used here; a
            ModelCheckpoint where ``checkpointing`` was switched off (False).
        UnknownAliasError: an alias that nothing provides.
    """
    chosen = [] if callbacks is None else [_callback(item, adapters) for item in _several(callbacks)]
    of_plugins = _of_plugins(defaults, chosen, notes)
    if checkpointing is False and (savers := [c for c in chosen if _saves(c, adapters)]):
        raise ConfigurationError(
            f"'enable_checkpointing' is False, but 'callbacks' holds a {type(savers[0]).__name__}: leave one out"
        )
    chosen += [callback for callback in of_plugins if checkpointing is not False or not _saves(callback, adapters)]
    kinds = [adapters.kind_of_callback(callback) for callback in chosen]
    if kinds.count("progress_bar") > 1:
        bars = [type(callback).__name__ for callback, kind in zip(chosen, kinds, strict=True) if kind == "progress_bar"]
        raise ConfigurationError(f"'callbacks' must hold one progress bar at most (got {', '.join(bars)})")
    for wanted, own in ((model_summary, ModelSummary), (progress_bar, ProgressBar), (checkpointing, ModelCheckpoint)):
        if wanted and own.replaces not in kinds:
            chosen.append(own())
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


def _callback(item: Any, adapters: Adapters) -> Any:
    named = read_alias("callbacks", item)
    if isinstance(named, str):
        return from_alias("callback", named, "given by the user").value
    is_one = isinstance(item, Callback) or hasattr(item, "on_train_start")
    if isinstance(item, type) or not (is_one or adapters.of(item) is not None):
        make = f": make an object, {item.__name__}(...)" if isinstance(item, type) else ""
        raise ConfigurationError(f"'callbacks' must be a Callback, an alias or several of them (got {item!r}){make}")
    return item


def _saves(callback: Any, adapters: Adapters) -> bool:
    return adapters.kind_of_callback(callback) == "checkpoint"


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


def check_can_fit(run: RunState, module: Any) -> None:
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
