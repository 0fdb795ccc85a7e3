"""Read and write ``run.json``, in which rank 0 of a fit records what ran, how it ended and what it used."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Final

from torchhal.report._regular_files import read_text

RECORD_FILE: Final = "run.json"
SCHEMA: Final = 1


class DamagedRecordError(ValueError):
    """The file is no record, or one of a later release."""


def read_record(folder: str) -> list[dict[str, Any]]:
    """Return the fits that the record of a run's folder lists, the oldest first; empty without a record.

    Raises:
        DamagedRecordError: the file can't be understood.
        OSError: it can't be read.
    """
    path = os.path.join(folder, RECORD_FILE)
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise DamagedRecordError(f"{path} is no JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("fits"), list):
        raise DamagedRecordError(f"{path} is not the record of a run")
    if found.get("schema") != SCHEMA:
        raise DamagedRecordError(f"{path} has schema {found.get('schema')!r}, and this torchhal reads {SCHEMA}")
    if not all(isinstance(fit, dict) for fit in found["fits"]):
        raise DamagedRecordError(f"{path} lists what is no fit")
    fits: list[dict[str, Any]] = found["fits"]
    return fits


def write_record(folder: str, fits: list[dict[str, Any]], temporary_name: str) -> None:
    """Replace the record of a run's folder in one step; a reader finds the old or the new one.

    Args:
        folder: is created where it is missing.
        fits: plain data, but for values that are recorded as their text.
        temporary_name: of a file in the folder that nobody else writes.

    Raises:
        OSError: it can't be written.
    """
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, temporary_name)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, "fits": fits}, file, indent=1, default=_as_text)
            file.write("\n")
        os.replace(temporary, os.path.join(folder, RECORD_FILE))
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _as_text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


MAX_TEXT: Final = 300
"""Characters of a value that is no plain data, such as a tensor among the hyperparameters."""
