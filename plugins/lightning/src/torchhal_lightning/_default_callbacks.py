"""The callbacks that Lightning's Trainer adds by itself: a checkpoint, a progress bar, a summary of the model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torchhal
from torchhal.errors import ConfigurationError
from torchhal_lightning import _trees as trees


def with_defaults(
    callbacks: list[Any], root: str | None, *, checkpoint: bool | None, progress_bar: bool | None, summary: bool | None
) -> list[Any]:
    """Return ``callbacks`` and the default ones of the kinds that are missing.

    Args:
        callbacks: those given.
        root: the tree of the default ones; None: the first that is imported.
        checkpoint: ``enable_checkpointing``.
        progress_bar: ``enable_progress_bar``.
        summary: ``enable_model_summary``.

    Raises:
        ConfigurationError: a callback of a kind that is switched off, or two progress bars.
    """
    tree = trees.first(root)
    rich = any(isinstance(each, trees.classes("callbacks.RichProgressBar")) for each in callbacks)
    model_summary = tree.callbacks.RichModelSummary if rich else tree.callbacks.ModelSummary
    added = list(callbacks)
    for enabled, path, argument, own, make in (
        (checkpoint, "Checkpoint", "enable_checkpointing", (torchhal.ModelCheckpoint,), tree.callbacks.ModelCheckpoint),
        (progress_bar, "ProgressBar", "enable_progress_bar", (torchhal.ProgressBar,), _progress_bar(tree.__name__)),
        (summary, "ModelSummary", "enable_model_summary", (), model_summary),
    ):
        kinds = (*trees.classes(f"callbacks.{path}"), *own)
        found = [each for each in callbacks if isinstance(each, kinds)]
        if found and enabled is False and path != "ModelSummary":
            raise ConfigurationError(
                f"Trainer was configured with `{argument}=False` but found `{type(found[0]).__name__}` in callbacks "
                "list."
            )
        if path == "ProgressBar" and len(found) > 1:
            names = ", ".join(type(each).__name__ for each in found)
            raise ConfigurationError(f"You added multiple progress bar callbacks to the Trainer ({names}): keep one")
        if not found and enabled is not False:
            added.append(make())
    return added


@lru_cache
def _progress_bar(root: str) -> type:
    """Return torchhal's bar, which draws at most ten times a second, as one that passes for Lightning's."""
    base: type = trees.first(root).callbacks.ProgressBar
    if issubclass(base, torchhal.ProgressBar):  # the stand-in's
        return base

    class ProgressBar(torchhal.ProgressBar, base):  # type: ignore[misc]
        _trainer: Any = None

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._trainer = trainer

        def __reduce__(self) -> Any:
            state = {name: value for name, value in self.__getstate__().items() if name != "_trainer"}
            return _restored, (root, state)

    return ProgressBar


def _restored(root: str, state: dict[str, Any]) -> Any:
    bar = _progress_bar(root)()
    vars(bar).update(state)
    return bar
