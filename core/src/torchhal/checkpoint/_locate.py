"""Make the location of a checkpoint from a local path or an fsspec URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torchhal.checkpoint._local_file import LocalPlace
from torchhal.checkpoint._location import CheckpointLocation, is_url
from torchhal.checkpoint._temp_files import is_temporary_name
from torchhal.errors import ConfigurationError

_FLATTENED_URL = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")


def location_of(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    call_options: Mapping[str, Any] | None = None,
    *,
    folder: bool = False,
) -> CheckpointLocation:
    """Return the location that ``path`` names.

    Args:
        path: a local path or a URL.
        options: an IO's own :attr:`.CheckpointIO.storage_options`, for its URLs.
        call_options: options for this one path, over ``options``.
        folder: True if ``path`` names a folder.

    Returns:
        A :class:`.CheckpointLocation`; nothing is opened yet.

    Raises:
        TypeError: ``path`` is no path, or a name in ``call_options`` means nothing there.
        ConfigurationError: ``path`` names no file, or the temporary file of a save.

    Checks: CIO-15.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(f"'path' must be a str or os.PathLike[str] (got {path!r})")
    if not text or "\0" in text:
        raise ConfigurationError(f"'path' must name a {'folder' if folder else 'file'} (got {text!r})")
    if not isinstance(path, str) and _FLATTENED_URL.match(text):
        raise ConfigurationError(
            f"'path' must be a str when it is a URL: pathlib makes one slash of two (got {path!r})"
        )
    name = re.split(r"[/\\]" if os.name == "nt" else "/", text)[-1]
    if not folder and name in ("", ".", ".."):
        raise ConfigurationError(f"'path' must name a file (got {text!r}, which is a folder's name)")
    if not folder and is_temporary_name(name):
        raise ConfigurationError(f"'path' must not look like the temporary file of a save (got {text!r})")
    if is_url(text):
        from torchhal.checkpoint._fsspec_file import remote_place

        return remote_place(text, options, call_options)
    if call_options:
        raise TypeError(
            f"'storage_options' must be empty for the local path {text!r} (got {', '.join(map(repr, call_options))})"
        )
    return LocalPlace(text, text)
