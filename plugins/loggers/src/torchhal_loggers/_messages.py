"""Say what becomes of a logger's records: raise, or warn, each thing once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torchhal.errors import message_of
from torchhal_loggers.errors import ServiceError

if TYPE_CHECKING:
    from torchhal_loggers._outbox import Record


class Messages:
    """What a logger has to say, from its thread too, and what it said.

    Args:
        service: its service's name, with which each message begins.
        on_error: ``"warn"`` or ``"raise"``.
    """

    def __init__(self, service: str, on_error: str) -> None:
        self.on_error = on_error
        self._service = service
        self._said_failure = False
        self._later: list[str] = []
        self._said_later = 0
        self._rejected: dict[str, str] = {}

    @property
    def said_failure(self) -> bool:
        return self._said_failure

    def fail(self, what: str) -> None:
        """Warn that the service can't be used, the first time.

        Raises:
            ServiceError: it is asked for.
        """
        if self.on_error == "raise":
            raise ServiceError(f"{self._service} {what}")
        if not self._said_failure:
            self._said_failure = True
            warnings.warn(f"{self._service} {what}. Training goes on without it", UserWarning, stacklevel=2)

    def add(self, text: str) -> None:
        """Have a text said by the next :meth:`report`, once; from any thread."""
        if text not in self._later:
            self._later.append(text)

    def reject(self, record: Record, error: BaseException) -> None:
        """Have it said, or raised, that the service refused a record; the first of its kind."""
        kind = next((key for key in record if key not in {"step", "time"}), "record")
        if kind not in self._rejected:
            self._rejected[kind] = f"{kind} {str(record.get(kind))[:200]}: {message_of(error)}"
            if self.on_error == "warn":
                self.add(f"has refused {self._rejected[kind]}. The rest is sent without it")

    def report(self) -> None:
        """Warn about what was added since the last time.

        Raises:
            ServiceError: the service has refused a record, and it is asked for.
        """
        if self._rejected and self.on_error == "raise":
            raise ServiceError(f"{self._service} has refused {next(iter(self._rejected.values()))}")
        while self._said_later < len(self._later):
            text = f"{self._service} {self._later[self._said_later]}"
            self._said_later += 1
            warnings.warn(text, UserWarning, stacklevel=2)
