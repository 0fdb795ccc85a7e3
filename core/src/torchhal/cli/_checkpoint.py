"""``torchhal checkpoint``: look into a checkpoint, and make one portable file of it."""

from __future__ import annotations

import argparse
from typing import Any, Final

from torchhal._terminal import echo
from torchhal._text_table import format_table
from torchhal.cli._output import output_to_stderr, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal checkpoint`` to its parser."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = commands.add_parser("inspect", help="list what is inside, without loading it")
    inspect.add_argument("path", metavar="PATH", help="a file, the folder of a sharded checkpoint, or a URL")
    inspect.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    inspect.set_defaults(run=_inspect)

    consolidate = commands.add_parser("consolidate", help="write one file that a Trainer loads under any strategy")
    consolidate.add_argument("source", metavar="PATH", help="a file, the folder of a sharded checkpoint, or a URL")
    consolidate.add_argument("target", metavar="FILE", help="ends in .safetensors: the weights alone, in that format")
    consolidate.add_argument("--weights-only", action="store_true", help="leave out what continuing a run needs")
    consolidate.add_argument("--force", action="store_true", help="replace FILE if it exists")
    consolidate.set_defaults(run=_consolidate)


def _inspect(arguments: argparse.Namespace) -> int:
    with output_to_stderr():
        from torchhal.checkpoint._inspection import describe
        from torchhal.resolve._checkpoint_ios import find_io

        alias, io = find_io(arguments.path)
        found = {"schema": 1, "path": arguments.path, "checkpoint_io": alias, **describe(io, arguments.path)}
    if arguments.json:
        print_json(found)
        return 0
    facts = {
        "checkpoint_io": found["checkpoint_io"],
        "torchhal": found["torchhal_version"],
        "epoch": found["epoch"],
        "step": found["global_step"],
        "world_size": found["world_size"],
        "optimizers": found["optimizers"],
        "rank_states": _listed(found.get("rank_states", {})),
        "contents": ", ".join(found["contents"]),
        "tensors": f"{len(found['tensors'])}, {size(found['bytes'])}",
    }
    rows = [(name, str(value)) for name, value in facts.items() if value is not None]
    tensors = [(t["name"], f"({', '.join(map(str, t['shape']))})", t["dtype"], t["bytes"]) for t in found["tensors"]]
    for line in [*format_table(rows), *format_table(tensors, max_width=MAX_COLUMN_WIDTH)]:
        echo(line)
    return 0


def _listed(writers: dict[str, Any]) -> str | None:
    """Return ``"strategy 'ddp' (torchhal.DDPStrategy)"``, for each component whose ranks have saved a state."""
    named = [f"{kind} {writer['alias'] or writer['class']!r} ({writer['class']})" for kind, writer in writers.items()]
    return ", ".join(named) or None


def _consolidate(arguments: argparse.Namespace) -> int:
    with output_to_stderr():
        from torchhal.checkpoint._consolidate import consolidate
        from torchhal.resolve._checkpoint_ios import find_io

        source, target = arguments.source, arguments.target
        _, io = find_io(source)
        tied = consolidate(io, source, target, weights_only=arguments.weights_only, force=arguments.force)
    echo(f"wrote {target}")
    for name, kept in tied.items():
        echo(f"{name} is in it as {kept}: they share memory")
    return 0


MAX_COLUMN_WIDTH: Final = 60
"""Characters of a column; a longer name shifts its own row."""


def size(count: int) -> str:
    """Format a number of bytes as ``"1.5 GiB (1610612736 bytes)"``."""
    from torchhal.memory_estimate import format_bytes

    short = format_bytes(count)
    return short if short.endswith("bytes") else f"{short} ({count} bytes)"
