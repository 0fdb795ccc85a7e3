"""Save a run that a signal stops, and find its last checkpoint, where Lightning's ModelCheckpoint saves."""

from __future__ import annotations

import glob
import os
from typing import Any

import torchhal
from torchhal.trainer.adapters import RunState


class SaverBeside(torchhal.ModelCheckpoint):
    """Saves into the folder of one of Lightning's ModelCheckpoints, and only when a signal ends the run.

    Args:
        theirs: the callback.
        run: of the Trainer.
    """

    def __init__(self, theirs: Any, run: RunState) -> None:
        super().__init__(_folder(theirs, run), every_n_epochs=0)
        self.theirs = theirs

    def follow(self) -> None:
        """Take over which of the callback's checkpoints is the best."""
        self.best_model_path = str(self.theirs.best_model_path)

    def candidate_folders(self, trainer: Any) -> list[str]:
        """Return the folder, and those of earlier runs where each has one of its own (``version_3``)."""
        folder = str(self.dirpath)
        run = os.path.dirname(folder)
        if not os.path.basename(run).startswith("version_"):
            return [folder]
        others = glob.glob(os.path.join(glob.escape(os.path.dirname(run)), "version_*", os.path.basename(folder)))
        return [folder, *sorted({*others} - {folder}, key=os.path.getmtime, reverse=True)]


def _folder(theirs: Any, run: RunState) -> str:
    """Return where a ModelCheckpoint of Lightning's saves, as it finds out in its ``setup``."""
    if theirs.dirpath is not None:
        return str(os.fspath(theirs.dirpath))
    if not run.loggers:
        return os.path.join(run.default_root_dir, "checkpoints")
    logger: Any = run.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(str(logger.save_dir or run.default_root_dir), str(logger.name), version, "checkpoints")
