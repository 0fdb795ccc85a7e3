"""Collect the messages with which workers end, and derive the result or the error for the caller."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from torchhal.distributed import failures
from torchhal.distributed.failures import STILL_HERE, Failure, exit_for_signal
from torchhal.errors import LaunchError

__all__ = [
    "WorkerOutcomes",
]


class WorkerOutcomes:
    """The messages of ``torchhal.launchers.worker``, of ``num_workers`` workers."""

    def __init__(self, num_workers: int, *, instead: str) -> None:
        self.problem: LaunchError | None = None
        """Why the call can't be made at all."""
        self.failures: list[tuple[Failure, bytes | None]] = []
        self._num_workers = num_workers
        self._instead = instead

    def take(self, rank: int, message: Sequence[Any]) -> Failure | None:
        """Record the message of a worker at its end and return its failure, if it is one."""
        kind = message[0]
        if kind == "failed":
            failure = Failure.from_json(message[1])
            self.failures.append((failure, message[2]))
            return failure
        if kind == "unreadable":
            self.problem = LaunchError(
                f"the function or its arguments can't be loaded in a worker ({message[1]}): define their classes at "
                f"the top level of an importable module, {self._instead}"
            )
        elif kind == "unsendable":
            self.problem = LaunchError(
                f"the function has run, but its result can't be sent back from rank {rank} ({message[1]}): "
                "return numbers, strings, tensors and containers of them"
            )
        return None

    def raise_outcome(self, received: Sequence[int] = ()) -> None:
        """Raise the error for the caller, if any; return when the function has run on all ranks.

        ``received``: the signals that this process was sent meanwhile.
        """
        if self.problem is not None:
            raise self.problem
        if received and self._is_the_signals():
            raise exit_for_signal(received[0], agreed=True)  # they have reported where they stopped
        if not self.failures:
            return
        codes = {failure.exit_code for failure, _ in self.failures}
        if len(codes) == 1 and len(self.failures) == self._num_workers and None not in codes:
            raise SystemExit(codes.pop())  # every rank has called sys.exit with it: it is the job's status
        failure, data = min(self.failures, key=lambda pair: pair[0].weight)
        failures.install_excepthook()
        error = failure.error()
        for other, _ in self.failures:
            if other is not failure and other.secondary and other.message.startswith(STILL_HERE):
                error.args = (f"{error.args[0]}\n{other.text()}",)
        error.__cause__ = _unpickled(data)
        raise error

    def _is_the_signals(self) -> bool:
        """Return whether nothing but a signal has ended the workers.

        A worker that receives it before training exits, and the others fail because it is missing.
        """
        ended = [failure for failure, _ in self.failures]
        causes = [failure for failure in ended if not (failure.secondary or failure.transport)]
        return not ended or (bool(causes) and all(failure.stopped for failure in causes))


def _unpickled(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
