"""Fill patterns like ``"{epoch}-{val_loss:.2f}"`` in to file names of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchhal.errors import ConfigurationError

_FIELD = re.compile(r"\{([^{}:]*)(:[^{}]*)?\}")


def check_pattern(name: str, pattern: str) -> str:
    """Return ``pattern``, the argument called ``name``; raise unless it can become a file name."""
    if not isinstance(pattern, str) or not pattern:
        raise TypeError(f"'{name}' must be a non-empty str or None (got {pattern!r})")
    literal = _FIELD.sub("", pattern)
    if "/" in literal or "\\" in literal:
        raise ConfigurationError(f"'{name}' must be a name without folders (got {pattern!r}): put them into dirpath")
    if "{" in literal or "}" in literal or any(not match[1].strip() for match in _FIELD.finditer(pattern)):
        raise ConfigurationError(f"'{name}' must have its keys in braces, as in '{{epoch}}-{{step}}' (got {pattern!r})")
    return pattern


def fill_pattern(pattern: str, values: Mapping[str, Any], *, insert_names: bool, equals: str = "=") -> str:
    """Return ``pattern`` with each ``{key}`` or ``{key:format}`` replaced by ``key=value`` or by the value alone.

    Args:
        pattern: a pattern that :func:`check_pattern` accepts.
        values: the values by key.
        insert_names: True for ``key=value``.
        equals: stands between key and value.

    Raises:
        ConfigurationError: an unknown key, with the known ones; or a format that doesn't fit.
    """

    def fill(match: re.Match[str]) -> str:
        key, layout = match[1], (match[2] or ":")[1:]
        if key not in values:
            raise ConfigurationError(
                f"the checkpoint file name {pattern!r} has the key {key!r}, which is not known; known are "
                f"{', '.join(map(repr, sorted(values)))}"
            )
        value = values[key]
        if isinstance(value, Tensor):
            value = value.item()
        try:
            text = format(value, layout)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"the checkpoint file name {pattern!r} can't format {key}={value!r} with {layout!r}: {error}"
            ) from error
        # a slash in a metric's name is no folder
        return (f"{key}{equals}{text}" if insert_names else text).replace("/", "_")

    return _FIELD.sub(fill, pattern)
