"""Define the contract of profilers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


class ActionTime(NamedTuple):
    """The time of one action: seconds without those of the actions inside it, and how often it ran."""

    seconds: float
    calls: int


class Profiler:
    """Base class of profilers, which measure the actions of a fit.

    ``Trainer(profiler=...)`` calls the methods in each process that trains, in this order: :meth:`setup` before the
    first batch; :meth:`start` and :meth:`stop` around each action, which nest; :meth:`step` after each training batch;
    :meth:`teardown` after the last batch, also where the fit fails. Rank 0 then prints :meth:`summary`.

    The actions are ``"loader"``, ``"transfer"``, ``"forward"``, ``"backward"``, ``"clipping"``, ``"optimizer"``
    (clearing the gradients and stepping schedulers included), ``"callbacks"`` (hooks of callbacks and of the model),
    ``"logging"``, ``"communication"`` (the strategy's collectives, with several processes), ``"checkpoint"``,
    ``"validation"`` (all of it that is none of the others) and ``"fit"`` around everything. A strategy that computes
    the loss and its backward in one call has ``"forward+backward"``, one that runs whole steps ``"step"``.

    A subclass defines :meth:`start` and :meth:`stop`, and must be picklable where processes are spawned.

    .. versionadded:: 0.2
    """

    def setup(self, trainer: Any) -> None:
        """Begin a fit; what an earlier one has measured is dropped.

        Args:
            trainer: the Trainer, whose ``strategy`` has the accelerator, the device and the rank.
        """

    def start(self, action: str) -> None:
        """Begin an action, inside the one that is running."""
        raise NotImplementedError(f"{type(self).__name__} must define start(action)")

    def stop(self, action: str) -> None:
        """End an action, the latest that was started."""
        raise NotImplementedError(f"{type(self).__name__} must define stop(action)")

    def step(self) -> None:
        """Count a training batch, whose hooks are done."""

    def teardown(self) -> None:
        """End the fit: write files, release what is held. Called once for each :meth:`setup`."""

    def summary(self) -> str:
        """Return what was measured as text; empty if there is nothing to print."""
        return ""

    def times(self) -> Mapping[str, ActionTime]:
        """Return the time of each action of this process, for the run's record; empty if none is measured."""
        return {}

    @contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """Measure a region of the user's own: ``with trainer.profiler.profile("augment"): ...``.

        Args:
            action: its name in the table and the trace.
        """
        self.start(action)
        try:
            yield
        finally:
            self.stop(action)


class PassThroughProfiler(Profiler):
    """Profiler of a Trainer that has none: it measures nothing, and a fit doesn't call it.

    .. versionadded:: 0.2
    """

    def start(self, action: str) -> None:
        """Do nothing."""

    def stop(self, action: str) -> None:
        """Do nothing."""
