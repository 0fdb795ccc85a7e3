"""Decide from the source of a manifest whether it can contribute to a hook, without running it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator

_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\.*)(\w*)", re.MULTILINE)
_DYNAMIC = re.compile(r"import\s*\*|\b(?:__getattr__|__dict__|__import__|globals|vars|locals|setattr|exec|eval)\b")
# A hook may have another name than its function's, and a name may come out of torchhal.plugin.HOOKS.
_RENAMED = re.compile(r"\b(?:specname|HOOKS|import_module|runpy)\b|sys\.modules")


def may_implement(hook: str, module: str, folder: str | None) -> bool:
    """Return whether the manifest ``module`` may implement ``hook``; False only if its source shows that it can't.

    A name gets into a module by being written there, by a star import, or by code that sets attributes; a hook of
    another name can come with an import. So the answer is False for a source that doesn't hold the hook's name, sets
    nothing by other means, and imports nothing but torchhal, pluggy and the standard library.

    Args:
        hook: as ``"torchhal_accelerators"``.
        module: dotted name of the manifest.
        folder: in which its distribution is installed, if known.
    """
    source = _source(module, folder)
    if source is None or hook in source or _DYNAMIC.search(source) or _RENAMED.search(source):
        return True
    harmless = sys.stdlib_module_names | {"torchhal", "pluggy"}
    return any(dots or top not in harmless for dots, top in _IMPORT.findall(source))


def _source(module: str, folder: str | None) -> str | None:
    if module in sys.modules:  # what is imported may differ from what lies on the disk
        return None
    for base in _folders(module, folder):
        for ending in (".py", os.sep + "__init__.py"):
            try:
                with open(base + ending, encoding="utf-8") as file:
                    return file.read()
            except (OSError, UnicodeDecodeError):
                continue
    return None


def _folders(module: str, folder: str | None) -> Iterator[str]:
    top, *inner = module.split(".")
    if folder is not None:
        yield os.path.join(folder, top, *inner)
    # An editable install has its modules elsewhere; looking for the top-level package imports nothing.
    try:
        spec = importlib.util.find_spec(top)
    except Exception:
        return
    if spec is None:
        return
    if not inner and spec.origin and spec.origin.endswith(".py"):
        yield spec.origin.removesuffix(".py").removesuffix(os.sep + "__init__")
    for location in spec.submodule_search_locations or ():
        yield os.path.join(location, *inner)
