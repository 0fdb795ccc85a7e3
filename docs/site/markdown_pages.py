"""Copy the repository's Markdown pages into the site's source folder, with their links rewritten.

The README is the start page, docs/README.md the list of all pages, a plugin's README a page of its own, and a script
among the tutorials a page that shows it. A link to a file that is no page of the site leads to the repository.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
KINDS = ("tutorials", "how-to", "reference", "explanation")
"""The folders of docs/ whose pages are the site's."""

ASSETS = ("images", "hub")
"""The folders of docs/ that pages show, or link to, copied as they are."""

OTHERS = {
    "README.md": "index.md",
    "docs/README.md": "all-pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Page outside the four kinds -> its path in the site."""

_FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<code>(?P<ticks>`+).+?(?P=ticks))|\]\((?P<target>[^)\s]+)\)", re.DOTALL)


def site_paths() -> dict[str, str]:
    """Return each page of the repository that the site has, as ``{"docs/how-to/train.md": "how-to/train.md"}``."""
    found = dict(OTHERS)
    for kind in KINDS:
        for page in sorted((DOCS / kind).glob("*.md")) + sorted((DOCS / kind).glob("*.py")):
            found[f"docs/{kind}/{page.name}"] = f"{kind}/{page.stem}.md"
    for readme in sorted(ROOT.glob("plugins/*/README.md")) + sorted(ROOT.glob("plugins/*/*/README.md")):
        path = readme.relative_to(ROOT).parent
        found[f"{path}/README.md"] = f"plugins/{'-'.join(path.parts[1:])}.md"
    return found


def copy_pages(target: Path, source_url: str) -> None:
    """Write every page, and what the pages show, to ``target``.

    Args:
        target: the folder, which exists.
        source_url: where the repository's files can be read, such as ``https://host/owner/name/blob/v1.0``.
    """
    paths = site_paths()
    for origin, path in paths.items():
        text = (ROOT / origin).read_text(encoding="utf-8")
        if origin.endswith(".py"):
            text = _script_page(origin, text)
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(rewrite(text, origin, paths, source_url), encoding="utf-8")
    for folder in ASSETS:
        shutil.copytree(DOCS / folder, target / folder, ignore=shutil.ignore_patterns("*.py"))


def rewrite(text: str, origin: str, paths: Mapping[str, str], source_url: str) -> str:
    """Return the text of the page ``origin`` with its links rewritten for the site, and without comments for tests."""
    parts = []
    for is_code, part in _split(text):
        if not is_code:
            part = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), part)  # lines keep their numbers
            part = _LINK.sub(lambda match: _relinked(match, origin, paths, source_url), part)
        parts.append(part)
    return "".join(parts)


def _split(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a page in order, each with whether it is a fenced code block."""
    end = 0
    for match in _FENCED.finditer(text):
        yield False, text[end : match.start()]
        yield True, match[0]
        end = match.end()
    yield False, text[end:]


def _relinked(match: re.Match[str], origin: str, paths: Mapping[str, str], source_url: str) -> str:
    target = match["target"]
    if target is None or "://" in target or target.startswith(("#", "mailto:")):
        return match[0]
    name, _, anchor = target.partition("#")
    file = os.path.normpath(os.path.join(os.path.dirname(origin), name))
    if not (ROOT / file).exists():
        raise FileNotFoundError(f"{origin} links to {target}, which is not in the repository")
    folder, _, below = file.removeprefix("docs/").partition("/")
    if file in paths:
        link = os.path.relpath(paths[file], os.path.dirname(paths[origin]))
    elif file.startswith("docs/") and folder in ASSETS:
        link = os.path.relpath(f"{folder}/{below}", os.path.dirname(paths[origin]))
    else:
        link = f"{source_url}/{file}"
    return f"]({link}{'#' if anchor else ''}{anchor})"


def _script_page(origin: str, code: str) -> str:
    """Return a page that shows a script: its docstring as text, and the whole as code."""
    about = ast.get_docstring(ast.parse(code)) or ""
    title = Path(origin).stem.replace("_", " ").capitalize()
    body = code.split('"""', 2)[2].lstrip("\n")
    return f'# {title}\n\n{about}\n\n```python title="{origin}"\n{body.rstrip()}\n```\n'
