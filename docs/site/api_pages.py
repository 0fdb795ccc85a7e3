"""Write a page for each public module of core and of the plugins, from what its ``__all__`` names.

The sources are read, not imported: neither torch nor a vendor's library is needed. A page holds directives for
mkdocstrings, which renders the docstrings.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import griffe
from docstrings import SphinxRoles
from markdown_pages import ROOT

SOURCES = [ROOT / "core" / "src", *sorted(ROOT.glob("plugins/*/src"))]
EXTENSION_API = ROOT / "plugins/conformance/src/torchhal_conformance/_extension_api.py"

IMITATIONS = ("torchhal_lightning.stand_in",)
"""Packages that imitate another one's names, whose own documentation describes them."""


@dataclass(frozen=True)
class Page:
    """The page of one public module."""

    module: str
    names: tuple[str, ...]
    """What ``__all__`` lists, without ``__version__`` and its like."""

    @property
    def path(self) -> str:
        """Where the page lies in the site."""
        return f"api/{self.module}.md"


def public_modules() -> dict[str, list[Page]]:
    """Return the pages of each distribution, by its import name, core first."""
    pages = {"torchhal": [Page(name, _all_of(_file_of(name))) for name in core_modules()]}
    for source in SOURCES[1:]:
        for package in sorted(path.parent for path in source.glob("torchhal_*/__init__.py")):
            pages[package.name] = [
                Page(name, names)
                for file in sorted(package.rglob("*.py"))
                if _is_public(name := _module_name(file, source)) and (names := _all_of(file))
            ]
    return {package: found for package, found in pages.items() if found}


def core_modules() -> tuple[str, ...]:
    """Return the modules of core that are stable, in the order of the extension API, ``torchhal`` first."""
    for node in ast.parse(EXTENSION_API.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MODULES" and node.value is not None:
            found = [name for names in ast.literal_eval(node.value).values() for name in names]
            return ("torchhal", *sorted(name for name in found if name != "torchhal"))
    raise LookupError(f"{EXTENSION_API} has no MODULES")


def _is_public(module: str) -> bool:
    return not any(part.startswith("_") for part in module.split(".")) and not module.startswith(IMITATIONS)


def _module_name(file: Path, source: Path) -> str:
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file_of(module: str) -> Path:
    path = SOURCES[0].joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _all_of(file: Path) -> tuple[str, ...]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(name for name in ast.literal_eval(node.value) if not name.startswith("__"))
    return ()


# -- the pages -----------------------------------------------------------------------------------------------


def write_pages(target: Path) -> None:
    """Write all pages, and their index, below ``target``."""
    packages = public_modules()
    extensions = griffe.load_extensions(SphinxRoles)
    loader = griffe.GriffeLoader(extensions=extensions, search_paths=SOURCES, allow_inspection=False)
    for package in packages:
        loader.load(package)
    loader.resolve_aliases(implicit=True)
    collection = loader.modules_collection
    homes = homes_of([page for pages in packages.values() for page in pages], collection)
    (target / "api").mkdir(parents=True, exist_ok=True)
    for pages in packages.values():
        for page in pages:
            (target / page.path).write_text("\n".join(_text(page, homes, collection)) + "\n", encoding="utf-8")
    (target / "api" / "index.md").write_text("\n".join(_index(packages, collection)) + "\n", encoding="utf-8")


def homes_of(pages: list[Page], collection: griffe.ModulesCollection) -> dict[str, str]:
    """Return each object -> the module on whose page it is described, of those that export it.

    That is the outermost one but for ``torchhal`` itself, which exports what its modules describe among its like.
    """
    homes: dict[str, str] = {}
    for page in sorted(pages, key=lambda page: (page.module == "torchhal", page.module.count("."))):
        for name in page.names:
            homes.setdefault(_origin(collection[f"{page.module}.{name}"]), page.module)
    return homes


def _origin(obj: griffe.Object | griffe.Alias) -> str:
    """Return where an object is defined, whatever re-exports it; it may be in a package that isn't loaded."""
    while isinstance(obj, griffe.Alias):
        try:
            obj = obj.target
        except griffe.AliasResolutionError as error:
            return error.alias.target_path
    return obj.path


def _text(page: Page, homes: Mapping[str, str], collection: griffe.ModulesCollection) -> Iterator[str]:
    module = collection[page.module]
    yield f"# `{page.module}`\n"
    yield f"::: {page.module}\n    options:\n      members: false\n      show_root_heading: false\n"
    objects = {name: module[name] for name in page.names}
    rows = []
    for name, obj in objects.items():
        home = homes[_origin(obj)]
        if not _origin(obj).startswith("torchhal"):
            rows.append(f"| `{name}`{{ #{page.module}.{name} }} | `{_origin(obj)}` |")
        elif home != page.module:
            # An id of its own, so that references by this name lead here.
            rows.append(f"| [`{name}`][{home}.{name}]{{ #{page.module}.{name} }} | {summary(obj)} |")
        else:
            continue
    if rows:
        yield "\n".join(["| name | |", "|---|---|", *rows, ""])
    for name, obj in objects.items():
        if homes[_origin(obj)] == page.module and _origin(obj).startswith("torchhal"):
            yield f"::: {page.module}.{name}\n    options:\n      inherited_members: {json.dumps(inherited(obj))}\n"


def inherited(obj: griffe.Object | griffe.Alias) -> list[str]:
    """Return the public members that a class has from bases in private modules, among which it is divided.

    What a public base has of such bases is described with that base.
    """
    if not obj.is_class:
        return []
    bases = obj.mro()
    of_public = {base.path for public in bases if not _in_private_module(public) for base in (public, *public.mro())}
    private = {base.path for base in bases} - of_public
    return sorted(
        name
        for name, member in obj.inherited_members.items()
        if not name.startswith("_") and member.has_docstring and member.final_target.parent.path in private
    )


def _in_private_module(cls: griffe.Class) -> bool:
    return any(part.startswith("_") for part in cls.module.path.split("."))


def summary(obj: griffe.Object | griffe.Alias) -> str:
    """Return the first paragraph of a docstring, for a cell of a table."""
    text = obj.docstring.value if obj.docstring else ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def _index(packages: Mapping[str, list[Page]], collection: griffe.ModulesCollection) -> Iterator[str]:
    yield "# API reference\n"
    yield "Generated from the docstrings: what each package's `__all__` names. Of core these are the modules that"
    yield "[plugins may import from](../reference/extension-api.md); anything else may change in any release.\n"
    for package, pages in packages.items():
        yield f"## {package}\n\n| module | |\n|---|---|"
        for page in pages:
            yield f"| [`{page.module}`]({page.module}.md) | {summary(collection[page.module])} |"
        yield ""
