"""Share a library that has one run per process among loggers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchhal_loggers.service import ServiceLogger


class SingleRun:
    """Whose run it is: the logger that wants to begin another ends it first."""

    def __init__(self) -> None:
        self._start_in_process()

    def _start_in_process(self) -> None:
        self._process = os.getpid()
        self._beginning = threading.Lock()
        self._owner: weakref.ref[ServiceLogger] | None = None

    @contextmanager
    def beginning(self, logger: ServiceLogger) -> Iterator[None]:
        """Keep other loggers from beginning a run meanwhile, and end that of another one.

        Raises:
            RuntimeError: the other logger is sending at this moment.
        """
        if self._process != os.getpid():
            self._start_in_process()
        with self._beginning:
            owner = self._owner() if self._owner is not None else None
            if owner is not None and owner is not logger and not owner.release():
                raise RuntimeError(f"{logger.service} has one run per process, which another logger is using")
            yield
            self._owner = weakref.ref(logger)
