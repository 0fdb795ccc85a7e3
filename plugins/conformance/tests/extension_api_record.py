"""Record the extension API of a release, and compare the present one with it.

``python plugins/conformance/tests/extension_api_record.py`` prints what has changed since the last release;
``--release`` records the present one as that of the running version, when that is released.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torchhal
from torchhal_conformance._extension_api import MODULES

FOLDER = Path(__file__).parents[3] / "docs" / "reference" / "extension-api"

STILL_CALLED = {"check_fit"}
"""Methods of whose overrides core still calls the form that the last release had: see docs/reference/versions.md."""

Record = Mapping[str, Mapping[str, Any]]


def present() -> dict[str, dict[str, Any]]:
    """Return ``{module: {name: description}}`` of the running torchhal, as JSON holds it."""
    modules = [importlib.import_module(name) for names in MODULES.values() for name in names]
    return {
        module.__name__: {name: _describe(getattr(module, name)) for name in sorted(module.__all__) if name[0] != "_"}
        for module in modules
    }


def _describe(value: Any) -> dict[str, Any]:
    if isinstance(value, type):
        members = {
            name: _describe(inspect.getattr_static(value, name))
            for name in dir(value)
            if name[0] != "_" and _is_ours(value, name)
        }
        return {
            "kind": "class",
            "abstract": sorted(getattr(value, "__abstractmethods__", ())),
            "parameters": _parameters(value),
            "members": members,
        }
    if isinstance(value, staticmethod | classmethod):
        return {"kind": type(value).__name__, "parameters": _parameters(value.__func__)}
    if inspect.isroutine(value) and callable(value):  # a descriptor of an attribute is a routine, too
        return {"kind": "function", "parameters": _parameters(value)}
    return {"kind": "value"}


def _is_ours(cls: type, name: str) -> bool:
    """Return whether the member ``name`` is defined in a class of torchhal's, and not in str or torch.nn.Module."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), object)
    return owner.__module__.partition(".")[0] == "torchhal"


def _parameters(value: Any) -> list[str] | None:
    """Return the parameters as ``name``, ``name=`` with a default, ``*name``, ``**name``, ``keyword-only:name``."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    marks[inspect.Parameter.KEYWORD_ONLY] = "keyword-only:"
    return [
        f"{marks.get(one.kind, '')}{one.name}{'=' if one.default is not one.empty else ''}"
        for one in parameters
        if one.name[0] != "_"
    ]


def breaks(old: Record, new: Record) -> Iterator[str]:
    """Yield what a plugin written for ``old`` may rely on and ``new`` doesn't have."""
    for module, names in old.items():
        for name, before in names.items():
            place = f"{module}.{name}"
            after = new.get(module, {}).get(name)
            if after is not None:
                yield from _changed(place, before, after)
            elif not _is_deprecated(module, name):
                yield f"{place} is gone"


def additions(old: Record, new: Record) -> Iterator[str]:
    """Yield the names, and members of classes, that ``new`` has and ``old`` has not."""
    for module, names in new.items():
        for name, after in names.items():
            before = old.get(module, {}).get(name)
            if before is None:
                yield f"{module}.{name}"
            else:
                yield from (f"{module}.{name}.{member}" for member in _members(after) if member not in _members(before))


def _members(description: Mapping[str, Any]) -> Mapping[str, Any]:
    members: Mapping[str, Any] = description.get("members", {})
    return members


def _is_deprecated(module: str, name: str) -> bool:
    """Return whether a name that is no longer listed still works, with a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            return False
    return any(issubclass(one.category, FutureWarning) for one in caught)


def _changed(place: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    if before["kind"] != after["kind"]:
        yield f"{place} is a {after['kind']}, and was a {before['kind']}"
        return
    old, new = before.get("parameters"), after.get("parameters")
    if old is not None and new is not None and place.rpartition(".")[2] not in STILL_CALLED:
        yield from _changed_parameters(place, old, new)
    for name in after.get("abstract", ()):
        if name not in before.get("abstract", ()):
            yield f"{place}.{name} is abstract"
    for name, member in _members(before).items():
        if name in _members(after):
            yield from _changed(f"{place}.{name}", member, _members(after)[name])
        else:
            yield f"{place}.{name} is gone"


def _changed_parameters(place: str, old: list[str], new: list[str]) -> Iterator[str]:
    new_names = {_name(one): one for one in new}
    takes_any = any(one.startswith("**") for one in new)
    for one in old:
        if one.startswith("*"):
            if one not in new:
                yield f"{place} takes no {one}"
        elif _name(one) not in new_names:
            if not takes_any:
                yield f"{place} has no argument {_name(one)!r}"
        elif one.endswith("=") and not new_names[_name(one)].endswith("="):
            yield f"{place} requires its argument {_name(one)!r}"
    old_names = {_name(one) for one in old}
    for one in new:
        if not one.startswith("*") and not one.endswith("=") and _name(one) not in old_names:
            yield f"{place} requires a new argument {_name(one)!r}"
    positional = [_name(one) for one in old if not one.startswith(("*", "keyword-only:"))]
    now = [_name(one) for one in new if not one.startswith(("*", "keyword-only:"))]
    if now[: len(positional)] != positional and set(positional) <= set(new_names):
        yield f"{place} takes its arguments in another order: {', '.join(now)} (before: {', '.join(positional)})"


def _name(parameter: str) -> str:
    return parameter.removeprefix("keyword-only:").rstrip("=")


def dumps(record: Record) -> str:
    """Return JSON with one line for each name, so that a difference of two releases can be read."""
    modules = []
    for module, names in sorted(record.items()):
        lines = [f"  {json.dumps(name)}: {json.dumps(one, sort_keys=True)}" for name, one in sorted(names.items())]
        modules.append(f" {json.dumps(module)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(modules) + "\n}\n"


def last_release() -> Path:
    """Return the file of the last release that is recorded."""
    return max(FOLDER.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])


def load(path: Path) -> dict[str, dict[str, Any]]:
    record: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--release", action="store_true", help="record the present API under the running version")
    if parser.parse_args().release:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{torchhal.__version__}.json").write_text(dumps(present()), encoding="utf-8")
        return 0
    old, new = load(last_release()), present()
    broken = list(breaks(old, new))
    for line in additions(old, new):
        print(f"new: {line}")
    for line in broken:
        print(f"breaks plugins of {last_release().stem}: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
