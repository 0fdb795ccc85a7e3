"""Read the variables that a launcher sets from a file, for the checks of a cluster environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchhal.errors import ConfigurationError
from torchhal_conformance._launcher_worlds import parse_worlds


def read_tables(path: str) -> Any:
    """Return the tables in a JSON or TOML file: what ``conformance_suite`` takes as ``tables``.

    The file holds one list, or one entry ``tables``. A table by layout is ``{"2+2": [...], "1+1+1": [...]}``.

    Raises:
        ConfigurationError: a file that can't be read, an unknown name, a table that is no list of variables per rank.
    """
    given = _parse(path)
    named = {"tables": given} if isinstance(given, list) else given
    if not isinstance(named, Mapping) or set(named) != {"tables"}:
        got = ", ".join(map(repr, named)) if isinstance(named, Mapping) else type(named).__name__
        raise ConfigurationError(f"{path!r} must hold tables named 'tables' (got {got})")
    tables = named["tables"]
    where = f"'tables' in {path!r}"
    if not isinstance(tables, (list, dict)) or not tables:
        raise ConfigurationError(
            f"{where} must be a list with the variables of each rank, or such lists by layout (got {tables!r})"
        )
    parse_worlds(tables, where)
    return tables


def _parse(path: str) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".toml"):
            return _toml(path, text)
        return json.loads(text)
    except ConfigurationError:
        raise
    except (OSError, ValueError) as error:  # those of json and tomllib are ValueErrors
        raise ConfigurationError(
            f"{path!r} can't be read as JSON or, with the suffix .toml, as TOML: {error}"
        ) from error


def _toml(path: str, text: str) -> Any:
    if sys.version_info < (3, 11):
        raise ConfigurationError(f"{path!r}: TOML needs Python 3.11 or newer; write the same tables as JSON")
    import tomllib

    return tomllib.loads(text)
