"""Read the variables that a launcher sets from a file, for the checks of a cluster environment."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchhal.errors import ConfigurationError
from torchhal_conformance._launcher_worlds import parse_worlds
from torchhal_conformance._suite import conformance_suite


def read_tables(path: str) -> dict[str, Any]:
    """Return the tables in a JSON or TOML file, by the name of the argument of ``conformance_suite``.

    A file that holds one list has the argument ``tables``. A table by layout is ``{"2+2": [...], "1+1+1": [...]}``.

    Raises:
        ConfigurationError: a file that can't be read, an unknown name, a table that is no list of variables per rank.
    """
    given = _parse(path)
    named = {"tables": given} if isinstance(given, list) else given
    known = [name for name in inspect.signature(conformance_suite).parameters if _is_table(name)]
    if not isinstance(named, Mapping) or not named or set(named) - set(known):
        got = ", ".join(map(repr, named)) if isinstance(named, Mapping) else type(named).__name__
        raise ConfigurationError(f"{path!r} must hold tables named {' or '.join(map(repr, known))} (got {got})")
    return {name: _checked(path, name, table) for name, table in named.items()}


def _is_table(name: str) -> bool:
    return name == "tables" or name.endswith("_tables")


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


def _checked(path: str, name: str, table: Any) -> Any:
    """Return ``table``: the variables of each of four ranks on two nodes, or layout -> those of each of its ranks."""
    where = f"{name!r} in {path!r}"
    by_layout = table if isinstance(table, dict) and table else {"2+2": table}
    for layout, rows in by_layout.items():
        told = where if rows is table else f"{where}, layout {layout!r},"
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigurationError(
                f"{told} must be a list with the variables of each rank (got {type(rows).__name__})"
            )
        for number, row in enumerate(rows):
            for variable, value in row.items():
                if not isinstance(value, str):
                    shown = f"{told} {variable} in row {number} must be a string, as in os.environ"
                    raise ConfigurationError(f"{shown} (got {value!r})")
    if name == "tables":
        parse_worlds(by_layout, where)
    return table
