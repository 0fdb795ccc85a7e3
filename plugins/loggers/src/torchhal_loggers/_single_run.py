"""Share a library that has one run per process among loggers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchhal_loggers.service import ServiceLogger


class SingleRun:
    """Whose run it is: the logger that wants to begin another ends it first."""

    def __init__(self) -> None:
        self._owner: weakref.ref[ServiceLogger] | None = None

    def take(self, logger: ServiceLogger) -> None:
        """End the run of another logger.

        Raises:
            RuntimeError: the other logger is sending at this moment.
        """
        owner = self._owner() if self._owner is not None else None
        if owner is not None and owner is not logger and not owner.release():
            raise RuntimeError(f"{logger.service} has one run per process, which another logger is using")
        self._owner = weakref.ref(logger)
