"""Print the results of a command: JSON, text for a terminal, and nothing that other code prints meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator

from torchhal._terminal import echo

__all__ = ["echo", "output_to_stderr", "print_json"]


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """Send to stderr what other code prints while it is imported: Python's prints and those of C code.

    A command's own output, often JSON, is printed outside of this.
    """
    with contextlib.ExitStack() as stack:
        try:
            sys.stdout.flush()
            own = os.dup(1)
            stack.callback(os.close, own)
            stack.callback(os.dup2, own, 1)
            os.dup2(2, 1)
        except (AttributeError, OSError):  # no stdout, or no stderr: then there is nothing to keep apart
            pass
        else:
            # What C's stdio holds back has to leave before the descriptor is put back.
            stack.callback(_flush_c)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _flush_c() -> None:
    try:
        import ctypes

        ctypes.CDLL(None).fflush(None)
    except (ImportError, OSError, TypeError, AttributeError):  # no such library here, so nothing to flush
        pass
