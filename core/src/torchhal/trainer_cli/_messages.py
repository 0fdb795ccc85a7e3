"""Shorten jsonargparse's messages to one line: it lists what every member of a union said about a value."""

from __future__ import annotations

import importlib
import inspect
import re
import reprlib
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torchhal.suggestions import did_you_mean

_UNION = "Does not validate against any of the Union subtypes"
_TYPES = {"NoneType": "null", "Mapping": "a dict", "Sequence": "a list", "dict": "a dict", "list": "a list"}


class _Reason(NamedTuple):
    """Why a value was refused by one member of a union."""

    text: str
    said: int
    """How much it says: 0 that the value has another type, 1 something else, 2 about a class that was named."""


def shorten(message: str) -> str:
    """Return a message of jsonargparse's as one line; one that is short already as it is."""
    return _read(message).text


def _read(message: str) -> _Reason:
    text = message.strip()
    for pattern, read in _FORMS:
        if match := re.match(pattern, text, re.DOTALL):
            return read(*match.groups())
    return _Reason(" ".join(text.split()), 1)


def _of_key(key: str, rest: str) -> _Reason:
    reason = _read(textwrap.dedent(rest))
    return reason._replace(text=f"{key}: {reason.text}")


def _of_class(path: str, rest: str) -> _Reason:
    text = _read(textwrap.dedent(rest)).text
    option = re.match(r"there is no option '([^']+)'", text)
    if option and not text.endswith("?"):
        text += did_you_mean(option[1], _parameters(path))
    return _Reason(f"{path}: {text}", 2)


def _of_callable(rest: str) -> _Reason:
    text, _, value = rest.partition(". Got value: ")
    path = re.search(r"class_path='([^']+)'", value)
    if path and not text.startswith("Expected"):
        return _of_class(path[1], text)
    reason = _read(text)
    return reason if reason.said == 0 else reason._replace(said=2)


def _of_union(rest: str) -> _Reason:
    """Return what says most of the errors, or the types that were expected."""
    body, _, tail = rest.rpartition("\nGiven value: ")
    errors = body.rpartition("\nGiven value type:")[0].partition("\nErrors:\n")[2]
    reasons = [_read(textwrap.dedent(item)) for item in _items(errors)]
    best = max(reasons, key=lambda reason: reason.said, default=_Reason("can't be read", 1))
    if best.said:
        return best
    names = list(dict.fromkeys(reason.text.partition(" (got ")[0].removeprefix("must be ") for reason in reasons))
    *first, last = names
    return _Reason(f"must be {', '.join(first)}{' or ' if first else ''}{last} (got {_value(tail)})", 0)


def _items(errors: str) -> Iterator[str]:
    """Split a list whose items begin with a dash and may have several lines."""
    for item in re.split(r"^- ", textwrap.dedent(errors), flags=re.MULTILINE):
        if item.strip():
            first, _, others = item.partition("\n")
            yield f"{first}\n{textwrap.dedent(others)}"


def _of_type(name: str, value: str | None) -> _Reason:
    short = name.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
    got = "" if value is None else f" (got {_value(value)})"
    return _Reason(f"must be {_TYPES.get(short, short)}{got}", 0)


def _of_yaml(problem: str) -> _Reason:
    return _Reason("no YAML: " + " ".join(problem.replace('in "<unicode string>", ', "at ").split()), 1)


def _value(text: str) -> str:
    nested = re.match(r"NestedArg\(key='[^']*', val='(.*)'\)$", text.strip(), re.DOTALL)
    return reprlib.repr(nested[1] if nested else text.strip())


def _parameters(path: str) -> list[str]:
    """Return the names of the arguments of a class, for a suggestion."""
    module, _, name = path.rpartition(".")
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return []


_FORMS: list[tuple[str, Callable[..., _Reason]]] = [
    (r'Parser key "([^"]+)":\s?(.*)', _of_key),
    (rf"{_UNION}(.*)", _of_union),
    (r"- Expected a path but \S+ either not accessible or invalid\n- (.*)", lambda rest: _read(textwrap.dedent(rest))),
    (r"Problems parsing config: (.*)", _of_yaml),
    (r"Unable to load config ['\"]([^'\"]+)['\"].*", lambda path: _Reason(f"{path!r} can't be read", 1)),
    (r"Unexpected config: .*", lambda: _Reason("must be a dict of options", 1)),
    (r"Problem with given class_path '([^']+)':\s?(.*)", _of_class),
    (r"Type .+? expects a function or a callable class: (.*)", _of_callable),
    (r"Expected an? (<class '[^']+'>)(?:\. Got value: (.*))?$", _of_type),
    (r"Expected '[^']+' to be a subclass of <class '([^']+)'>.*", lambda name: _Reason(f"must be {name}", 0)),
    (r"Expected a dot import path string: (.*)", lambda value: _Reason(f"must be a class (got {_value(value)})", 0)),
    (r"Not a valid subclass of (\w+)(.*)", lambda name, _: _Reason(f"must be {name}", 0)),
    (r"Import path does not correspond to a subclass of (\w+)", lambda name: _Reason(f"must be {name}", 0)),
    (r"the following arguments are required: (.*)", lambda names: _Reason(f"{names} must be given", 2)),
    (r"(?:Group '[^']+' does not accept option|Option) '([^']+)'(?: is not accepted)?$",
     lambda name: _Reason(f"there is no option {name!r}", 2)),
]  # fmt: skip


def explain_import(path: str) -> str:
    """Return why ``path``, of a class, can't be used; an empty string where it can be imported."""
    module, _, name = path.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return f"{path!r} can't be imported: {error}"
    if not hasattr(found, name):
        return f"{path!r} can't be imported: {module} has no {name}{did_you_mean(name, dir(found))}"
    return ""
