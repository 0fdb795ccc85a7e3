"""Run a sub-command of ``torchhal``: core's own, or one that a plugin contributes by ``torchhal_commands``.

Errors of torchhal end in one ``error:`` line and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import torchhal
from torchhal import registry
from torchhal._terminal import printable
from torchhal.cli._output import output_to_stderr
from torchhal.errors import TorchhalError, UnknownAliasError


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today is ambiguous when a later version adds an option.
        super().__init__(allow_abbrev=False, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code.

    Args:
        argv: the command line without its first word; that of this process if None.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a plugin's reason may be in letters that this locale lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        code: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe can still be caught
        return code
    except TorchhalError as error:
        between = "; " if isinstance(error, UnknownAliasError) else " "  # its lines are sentences of their own
        lines = (printable(" ".join(line.split())) for line in str(error).splitlines())
        print("error:", between.join(lines), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has closed the pipe. Python flushes once more at exit: discard that.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="torchhal", description="Train on any hardware, by plugin.")
    parser.add_argument("--version", action="version", version=f"torchhal {torchhal.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    if asked is None:
        for entry in [] if "--version" in argv else _all_commands():
            commands.add_parser(entry.names[0], help=entry.component.summary)
    else:
        with output_to_stderr():  # one of core's own is found without importing a plugin
            entry = registry.find("command", asked)
            configure: Any = entry.load()
            configure(commands.add_parser(asked, description=entry.component.summary))
    return parser.parse_args(argv)


def _all_commands() -> list[registry.RegistryEntry]:
    """Return the commands that can be called by their unqualified name."""
    with output_to_stderr():
        names = [name for name in registry.aliases("command") if "/" not in name]
        return [registry.find("command", name) for name in names]
