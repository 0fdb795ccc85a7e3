"""Save the configuration of a run in its folder."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchhal.checkpoint._location import is_url
from torchhal.checkpoint._temp_files import new_temporary_name
from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import Callback

if TYPE_CHECKING:
    from torchhal.trainer import Trainer


class SaveConfig(Callback):
    """Saves the configuration of a fit as ``config.yaml`` in the folder of its run, on rank 0.

    A file of another configuration that is there stays: the new one becomes ``config-2.yaml``, and a warning says so.
    A fit without a log folder, ``fast_dev_run`` and an evaluation save none. A file that can't be written is warned
    of, and stops no training.

    Args:
        text: the configuration, as YAML.
        filename: of the file.

    .. versionadded:: 0.2
    """

    def __init__(self, text: str, filename: str = "config.yaml") -> None:
        self._text = text
        self._filename = filename

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        """Save it, before anything else of the run is set up.

        Raises:
            ConfigurationError: a rank was given another configuration.
        """
        if trainer.world_size > 1:
            _check_same(trainer.strategy.all_gather_object(self._text))
        folder = trainer.log_dir
        if stage != "fit" or folder is None or is_url(folder) or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        try:
            name = write_new(folder, self._filename, self._text)
        except OSError as error:
            trainer.warn_once(f"the configuration can't be saved in {folder!r}: {error.strerror or error}")
            return
        if name != self._filename:
            trainer.warn_once(
                f"{self._filename} in {folder!r} is of another run: the configuration of this one is in {name}"
            )


def _check_same(texts: list[str]) -> None:
    """Raise ConfigurationError where the ranks have been given different configurations."""
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        pairs = itertools.zip_longest(texts[0].splitlines(), text.splitlines(), fillvalue="nothing")
        first, other = next((a.strip(), b.strip()) for a, b in pairs if a != b)
        raise ConfigurationError(
            f"every rank must be given the same configuration (rank 0 has {first!r}, rank {rank} has {other!r}): copy "
            "the files to every host; what depends on the host goes into environment variables that the data module "
            "reads"
        )


def write_new(folder: str, filename: str, text: str) -> str:
    """Write a file in one step, next to those of the same name with another content.

    Args:
        folder: is created where it is missing.
        filename: of the first one; ``-2`` and so on is added for the others.
        text: the content.

    Returns:
        The name of the file, which may have been there with this content.

    Raises:
        OSError: it can't be written.
    """
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, new_temporary_name())
    stem, ending = os.path.splitext(filename)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        number = 1
        while True:
            name = filename if number == 1 else f"{stem}-{number}{ending}"
            path = os.path.join(folder, name)
            if os.path.lexists(path):
                if _read(path) == text:
                    return name
                number += 1
                continue
            try:
                os.link(temporary, path)
            except FileExistsError:  # another job was faster: its file may say the same
                continue
            except OSError:  # the file system has no links
                os.replace(temporary, path)
            return name
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
