"""Drop output that stdout and stderr can't write while a Trainer runs, so that it doesn't end training.

A disk that is full (ENOSPC), a reader that has closed (EPIPE) or doesn't read (EAGAIN) raises an OSError in any code
that prints: a progress bar, a warning, a user's hook. Lost output of stdout is reported once on stderr.
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
"""Seconds to wait, once, for a reader that doesn't read from a non-blocking descriptor."""


class LossyStream:
    """Text stream whose ``write`` and ``flush`` raise no OSError; all other attributes are those of ``stream``.

    Args:
        stream: the stream to write to.
        name: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self._reported = False
        self._stalled = False

    def write(self, text: str) -> int:
        """Write ``text``, or drop it; return the number of characters."""
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
        """Flush the stream, and drop what it can't write within :data:`PATIENCE`."""
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
            with suppress(OSError, ValueError):  # one in memory, for example, has no descriptor
                _discard(self._stream)
        if not self._reported and self._name == "stdout":
            self._reported = True
            why = getattr(error, "strerror", None) or error
            write_stderr(f"torchhal: stdout can't be written ({why}): what is printed there is lost\n")


def _discard(stream: io.TextIOWrapper) -> None:
    """Empty the buffers of a stream that can't be written, which every write would try again.

    The interpreter would try it at its end, too, and exit with status 120. Python has no function for this, so the
    descriptor is that of the null device for a moment.
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
    """Replace ``sys.stdout`` and ``sys.stderr`` by a :class:`LossyStream` inside; a nested call does nothing."""
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
            if cast(Any, getattr(sys, name)) is lossy:  # a stream that was redirected since stays so
                setattr(sys, name, stream)
