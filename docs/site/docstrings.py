"""Render the Sphinx roles of docstrings as references of mkdocstrings (an extension of griffe)."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):`(?P<short>~?)(?P<name>[^`]+)`")
_DIRECTIVE = re.compile(r"^(?P<indent> *)\.\. (?P<kind>versionadded|deprecated):: *(?P<version>\S+) *", re.MULTILINE)
_WORDS = {"versionadded": "New in", "deprecated": "Deprecated since"}
_LITERAL = re.compile(r"::$", re.MULTILINE)
_LONE_COLONS = re.compile(r"^ *::\n", re.MULTILINE)


class SphinxRoles(griffe.Extension):
    """Replaces roles by references, directives of versions by a sentence, and ``::`` by a colon."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of each object as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, obj)


def to_markdown(text: str, scope: griffe.Object) -> str:
    """Return a docstring in Markdown; names are resolved as the code around ``scope`` resolves them."""
    text = _ROLE.sub(lambda match: _reference(match, scope), text)
    text = _DIRECTIVE.sub(lambda match: f"{match['indent']}*{_WORDS[match['kind']]} {match['version']}.* ", text)
    return _LITERAL.sub(":", _LONE_COLONS.sub("", text))


def _reference(match: re.Match[str], scope: griffe.Object) -> str:
    name = match["name"].lstrip(".")
    shown = name.rpartition(".")[2] if match["short"] else name
    # Optional: what has no page, such as a name of torch's, is shown as code.
    return f'<autoref identifier="{_resolved(name, scope)}" optional><code>{shown}</code></autoref>'


def _resolved(name: str, scope: griffe.Object) -> str:
    first, dot, rest = name.partition(".")
    here: griffe.Object | None = scope
    while here is not None:
        try:
            return here.resolve(first) + dot + rest
        except griffe.NameResolutionError:
            here = here.parent
    return name
