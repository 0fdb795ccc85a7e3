"""List installed plugins and their components: ``torchhal plugins``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

import torchhal
from torchhal import registry
from torchhal._terminal import echo, printable
from torchhal.cli._output import output_to_stderr, print_json
from torchhal.registry import PluginRecord


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal plugins`` to its parser."""
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.add_argument("--no-import", action="store_true", help="read metadata only; run no plugin's code")
    parser.set_defaults(run=_plugins)


def _plugins(arguments: argparse.Namespace) -> int:
    with output_to_stderr():
        records = registry.installed() if arguments.no_import else registry.plugins()
    if arguments.json:
        print_json({"schema": 1, "torchhal": torchhal.__version__, "plugins": [record.to_dict() for record in records]})
    else:
        echo("\n".join(map(printable, _listing(records))) or NO_PLUGINS)
    return 0


NO_PLUGINS: Final = "no plugins are installed; core's own parts are always there"


def _listing(records: list[PluginRecord]) -> Iterator[str]:
    for record in records:
        yield str(record).removeprefix("plugin ")
        yield from (f"  problem: {problem}" for problem in record.problems)
        for entry in record.components:
            part = entry.to_dict()
            other = f" ({', '.join(part['aliases'])})" if part["aliases"] else ""
            yield f"  {part['kind']} {part['alias']}{other}: {part['summary'] or part['target']}"
            if not part["available"]:
                yield f"    not available: {part['reason']}"
