"""Find the distributions that may concern torchhal by their entry_points.txt alone.

Reads one small file per installed distribution and imports neither ``importlib_metadata`` nor a plugin: with 500
distributions this takes a few milliseconds, where parsing their METADATA takes a hundred.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, cast

from torchhal.registry._declarations import has_group, has_group_bytes
from torchhal.registry._discovery import canonical

if TYPE_CHECKING:
    from importlib_metadata import Distribution


@dataclass(frozen=True, eq=False)
class IndexedDistribution:
    """A distribution whose entry_points.txt has a group of torchhal's, not parsed any further.

    Attributes:
        name: canonical, as far as it is known without METADATA.
        text: of entry_points.txt; None where it can't be decoded.
        folder: that modules installed with it lie in, where known.
        load: returns this distribution and, before or after it, others of the same name, in the order of sys.path.
    """

    name: str
    text: str | None
    folder: str | None
    load: Callable[[], list[Distribution]]


def index_installed() -> list[IndexedDistribution]:
    """Return the installed distributions that may concern torchhal, in the order of sys.path."""
    folders: dict[str, list[str]] = {}
    contents: dict[str, dict[str, bytes]] = {}
    others: list[Distribution] = []
    for entry in dict.fromkeys(sys.path):
        try:
            with os.scandir(entry or ".") as items:
                infos = [item.path for item in items if _is_metadata(item.name, entry)]
        except OSError:
            if os.path.isfile(entry):  # a zip file
                others += _distributions(entry)
            continue
        for info in infos:
            name = _name_of_folder(info)
            folders.setdefault(name, []).append(info)
            try:
                with open(f"{info}/entry_points.txt", "rb") as file:
                    content = file.read()
            except OSError:
                continue
            if has_group_bytes(content):
                contents.setdefault(name, {})[info] = content
    others += _of_other_finders()
    found = []
    for name, by_folder in contents.items():
        info = _first_valid(folders[name])
        if info not in by_folder:
            continue
        content = by_folder[info]
        try:
            text: str | None = content.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if text is None or has_group(text):
            found.append(IndexedDistribution(name, text, os.path.dirname(info), _loader(folders[name])))
    return [*found, *index_distributions(others)]


def index_distributions(distributions: Iterable[Distribution]) -> list[IndexedDistribution]:
    """Return those of ``distributions`` that may concern torchhal."""
    by_name: dict[str, list[Distribution]] = {}
    for distribution in distributions:
        try:
            name = canonical(getattr(distribution, "_normalized_name", None) or distribution.name)
        except Exception:
            continue
        if not name.startswith("~"):
            by_name.setdefault(name, []).append(distribution)
    found = []
    for name, same in by_name.items():
        for distribution in same:
            try:
                text = distribution.read_text("entry_points.txt") or ""
            except UnicodeDecodeError as error:
                if has_group_bytes(error.object):
                    found.append(IndexedDistribution(name, None, None, lambda same=same: same))  # type: ignore[misc]
                    break
            except Exception:
                found.append(IndexedDistribution(name, None, None, lambda same=same: same))  # type: ignore[misc]
                break
            else:
                if has_group(text):
                    found.append(IndexedDistribution(name, text, _folder(distribution), lambda same=same: same))  # type: ignore[misc]
                    break
    return found


def _first_valid(infos: list[str]) -> str:
    """Return the first folder of one name that is not the rest of an uninstalled version."""
    for info in infos if len(infos) > 1 else ():
        if any(os.path.exists(f"{info}/{file}") for file in ("METADATA", "PKG-INFO")):
            return info
    return infos[0]


def _is_metadata(name: str, folder: str) -> bool:
    # "~orchhal_x-1.0.dist-info" is what an interrupted pip leaves behind.
    lower = name.lower()
    in_egg = lower == "egg-info" and folder.lower().rstrip("/\\").endswith(".egg")
    return (lower.endswith((".dist-info", ".egg-info")) or in_egg) and not name.startswith("~")


def _name_of_folder(info: str) -> str:
    folder, name = os.path.split(info)
    if name.lower() == "egg-info":
        name = os.path.basename(folder)
    return canonical(name.rpartition(".")[0].partition("-")[0])


def _loader(infos: list[str]) -> Callable[[], list[Distribution]]:
    def load() -> list[Distribution]:
        import importlib_metadata

        return [importlib_metadata.Distribution.at(info) for info in infos]

    return load


def _distributions(entry: str) -> Iterator[Distribution]:
    import importlib_metadata

    yield from cast("Iterable[Distribution]", importlib_metadata.distributions(path=[entry]))


def _of_other_finders() -> Iterator[Distribution]:
    """Yield what finders on sys.meta_path other than Python's own provide."""
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_distributions", None)
        # importlib_metadata puts a finder of its own there, for the same folders
        if find is None or finder is PathFinder or type(finder).__module__.startswith("importlib_metadata"):
            continue
        from importlib.metadata import DistributionFinder

        try:
            yield from list(find(DistributionFinder.Context()))
        except Exception:
            continue


def _folder(distribution: Distribution) -> str | None:
    try:
        return str(distribution.locate_file(""))
    except Exception:
        return None
