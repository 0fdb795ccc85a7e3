"""stdout and stderr that drop what they can't write while a Trainer runs, for lost output must end no training.

A disk that is full (ENOSPC), a reader that is gone (EPIPE) or doesn't read (EAGAIN) is an OSError in whatever prints: a
progress bar, a warning, a hook of the user's. What is lost is lost; that it is, stderr says once for stdout.
"""

from __future__ import annotations

import io
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from torchhal.distributed.process import write_stderr

PATIENCE = 5.0
"""Seconds for which a reader that doesn't read a descriptor which doesn't block is waited for, once."""


class LossyStream:
    """A text stream whose ``write`` and ``flush`` raise no OSError; all else is the stream's own."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self._said = False
        self._stalled = False

    def write(self, text: str) -> int:
        try:
            written: int = self._stream.write(text)
        except BlockingIOError:  # part of it may be in the stream's buffer
            self.flush()
        except OSError as error:
            self._lose(error)
        except ValueError as error:  # UnicodeEncodeError is one, too
            if not self._is_closed:
                raise
            self._lose(error)
        else:
            return written
        return len(text)

    def flush(self) -> None:
        deadline = time.monotonic() + (0.0 if self._stalled else PATIENCE)
        while True:
            try:
                self._stream.flush()
            except BlockingIOError as error:
                left = deadline - time.monotonic()
                if left > 0:
                    select.select([], [self._stream], [], left)
                    continue
                self._stalled = True
                self._lose(error)
            except OSError as error:
                self._lose(error)
            except ValueError as error:
                if not self._is_closed:
                    raise
                self._lose(error)
            else:
                self._stalled = False
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def _is_closed(self) -> bool:
        return bool(getattr(self._stream, "closed", False))  # a stand-in of a notebook or a tee has no such attribute

    def _lose(self, error: Exception) -> None:
        if isinstance(self._stream, io.TextIOWrapper) and not self._is_closed:
            with suppress(OSError, ValueError):  # one in memory, say, has no descriptor
                _discard(self._stream)
        if not self._said and self._name == "stdout":
            self._said = True
            why = getattr(error, "strerror", None) or error
            write_stderr(f"torchhal: stdout can't be written ({why}): what is printed there is lost\n")


def _discard(stream: io.TextIOWrapper) -> None:
    """Empty the buffers of a stream that can't be written, which would be tried again by every write.

    At the interpreter's end, too, whose status they would turn into 120. Python has no call for it: for a moment the
    descriptor is the null device's.
    """
    descriptor = stream.fileno()
    kept, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
        stream.flush()
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(null)


@contextmanager
def lossy_streams() -> Iterator[None]:
    """Make ``sys.stdout`` and ``sys.stderr`` lossy inside it; entered again, it does nothing."""
    replaced: dict[str, tuple[Any, LossyStream]] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LossyStream):
            replaced[name] = stream, LossyStream(stream, name)
            setattr(sys, name, replaced[name][1])
    try:
        yield
    finally:
        for name, (stream, lossy) in replaced.items():
            lossy.flush()
            if cast(Any, getattr(sys, name)) is lossy:  # somebody who has redirected it since keeps that
                setattr(sys, name, stream)
