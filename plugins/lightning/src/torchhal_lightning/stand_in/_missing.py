"""Make classes of Lightning that have no counterpart: importable, and refused where they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from torchhal.errors import ConfigurationError


def missing(name: str, instead: str) -> type:
    """Return a class ``name`` that can be named in an annotation, and neither made nor subclassed.

    Args:
        name: of the class.
        instead: what to do, as a sentence of its own.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(f"torchhal's stand-in for Lightning has no {name}. {instead}")

    return type(name, (), {"__init__": refuse, "__init_subclass__": classmethod(refuse)})
