"""Read the variables that a launcher sets from a file, for the checks of a cluster environment."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torchhal.errors import ConfigurationError
from torchhal_conformance._suite import conformance_suite

RANKS: Final = 4
"""Rows of ``tables``: two nodes with two processes each."""


def read_tables(path: str) -> dict[str, list[dict[str, str]]]:
    """Return the tables in a JSON or TOML file, by the name of the argument of ``conformance_suite``.

    A file that holds one list has the argument ``tables``.

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


def _checked(path: str, name: str, table: Any) -> list[dict[str, str]]:
    """Return ``table``, which must be a list of mappings from the names of variables to their text."""
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise ConfigurationError(
            f"{name!r} in {path!r} must be a list with the variables of each rank (got {type(table).__name__})"
        )
    for number, row in enumerate(table):
        for variable, value in row.items():
            if not isinstance(value, str):
                told = f"{name!r} in {path!r}: {variable} in row {number} must be a string, as in os.environ"
                raise ConfigurationError(f"{told} (got {value!r})")
    if name == "tables" and len(table) != RANKS:
        raise ConfigurationError(
            f"'tables' in {path!r} must have {RANKS} rows, for two nodes with two processes each (got {len(table)})"
        )
    return table
