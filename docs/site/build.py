"""Build the documentation site of this checkout's version: ``make docs``.

``python docs/site/build.py [FOLDER]`` adds the version to FOLDER (``build/site``), which any static host can serve: a
folder for each version, ``versions.json`` for the selector in the page's header, and an ``index.html`` that leads to
the newest release. To publish a release, build it into the folder of the earlier ones. Any warning is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import api_pages
from markdown_pages import DOCS, ROOT, copy_pages, site_paths
from packaging.version import InvalidVersion, Version

HERE = Path(__file__).parent
LIST = DOCS / "README.md"

KINDS = {"Tutorials": "Tutorials", "How to": "How-to guides", "Reference": "Reference", "Explanation": "Explanation"}
"""Heading of docs/README.md -> the tab of the site."""

REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>torchhal</title>
<meta http-equiv="refresh" content="0; url={version}/">
<a href="{version}/">torchhal {version}</a>
"""


def build(folder: Path) -> Path:
    """Build this version into ``folder`` and return the version's own folder."""
    version, source_url = _project()
    settings = _settings()
    (ROOT / "build").mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="site-", dir=ROOT / "build"))
    pages = work / "pages"
    pages.mkdir()
    copy_pages(pages, f"{source_url}/blob/main")
    api_pages.write_pages(pages)
    shutil.copy(HERE / "site.css", pages)
    (work / "zensical.toml").write_text(settings, encoding="utf-8")
    _render(work)
    target = folder / version
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(work / "site", target)  # the generator writes below its own folder only
    _list_versions(folder)
    shutil.rmtree(work)
    return target


def _project() -> tuple[str, str]:
    """Return core's version and the address of the repository."""
    init = (ROOT / "core/src/torchhal/__init__.py").read_text(encoding="utf-8")
    project = (ROOT / "core/pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', init, re.MULTILINE)
    (source_url,) = re.findall(r'^Source = "(.+)"', project, re.MULTILINE)
    return version, source_url


def _render(work: Path) -> None:
    """Run the generator in ``work``, and take for an error what mkdocstrings warns of, too."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, check=False, cwd=work, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _, _ = re.sub(r"\x1b\[[\d;]*m", "", done.stdout).partition("Traceback (most recent call last)")
    print(said, end="")
    if done.returncode or re.search("^(griffe|mkdocstrings)", said, re.MULTILINE):
        raise SystemExit(f"the site is not built: mend the pages named above, which are copied to {work / 'pages'}")


# -- settings ------------------------------------------------------------------------------------------------


def _settings() -> str:
    """Return the generator's settings: zensical.toml with the folders, the navigation and where the sources are."""
    text = (HERE / "zensical.toml").read_text(encoding="utf-8")
    project = {"docs_dir": "pages", "site_dir": "site", "nav": navigation()}
    text = _with(text, "project", project)
    python = "project.plugins.mkdocstrings.handlers.python"
    text = _with(text, python, {"paths": list(map(str, api_pages.SOURCES))})
    return _with(text, f"{python}.options", {"extensions": [str(HERE / "docstrings.py")]})


def _with(text: str, table: str, values: Mapping[str, object]) -> str:
    """Return the settings ``text`` with these values in one of its tables, too."""
    lines = "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())
    return text.replace(f"[{table}]\n", f"[{table}]\n{lines}", 1)


def navigation() -> list[object]:
    """Return the tabs: the pages in the order of docs/README.md, then the plugins' READMEs and the API.

    Raises:
        SystemExit: docs/README.md leaves a page of docs/ out.
    """
    paths = site_paths()
    tabs: list[object] = [{"torchhal": ["index.md", "all-pages.md", "contributing.md", "changelog.md", "security.md"]}]
    listed = set()
    for heading, groups in _sections(LIST.read_text(encoding="utf-8")).items():
        tab: list[object] = []
        for title, targets in groups.items():
            files = [(DOCS / target).resolve().relative_to(ROOT).as_posix() for target in targets]
            own = [paths[file] for file in dict.fromkeys(files) if file.startswith("docs/")]
            listed.update(own)
            tab += [{title: own}] if title else own
        tabs.append({KINDS[heading]: tab})
    missing = [path for origin, path in paths.items() if origin.startswith("docs/") and path not in listed]
    if missing := sorted(set(missing) - {"all-pages.md"}):
        raise SystemExit(f"docs/README.md lists no {', '.join(missing)}: say there what a page is for")
    tabs.append({"Plugins": [path for path in paths.values() if path.startswith("plugins/")]})
    api: list[object] = ["api/index.md"]
    for package, pages in api_pages.public_modules().items():
        files = [page.path for page in pages]
        api += [{package: files}] if package == "torchhal" else files
    return [*tabs, {"API": api}]


def _sections(text: str) -> dict[str, dict[str, list[str]]]:
    """Return the links of docs/README.md by second-level heading and third-level heading ("" above the first)."""
    sections: dict[str, dict[str, list[str]]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        if heading in KINDS:
            groups = re.split(r"^### (.+)\n", body, flags=re.MULTILINE)
            found = zip(["", *groups[1::2]], groups[0::2], strict=True)
            sections[heading] = {title: re.findall(r"\]\(([^)#]+)", links) for title, links in found}
    return {heading: {title: links for title, links in groups.items() if links} for heading, groups in sections.items()}


def _toml(value: object) -> str:
    """Return a value in TOML's notation, which is JSON's but for tables."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


# -- versions ------------------------------------------------------------------------------------------------


def _list_versions(folder: Path) -> None:
    """Write what the selector of versions and the address without a version lead to."""
    names = newest_first(path.parent.name for path in folder.glob("*/index.html"))
    entries = [{"version": name, "title": name, "aliases": []} for name in names]
    (folder / "versions.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(REDIRECT.format(version=default_version(names)), encoding="utf-8")


def newest_first(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are versions, in the order of PEP 440; a host may have other folders."""
    versions = []
    for name in names:
        with suppress(InvalidVersion):
            versions.append((Version(name), name))
    return [name for _, name in sorted(versions, reverse=True)]


def default_version(names: Sequence[str]) -> str:
    """Return the newest release among versions, the newest first; a pre-release only where there is nothing else."""
    return next((name for name in names if not Version(name).is_prerelease), names[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    print(f"built: {build(parser.parse_args().folder)}")
