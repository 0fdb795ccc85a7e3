"""State words of a Trainer as Lightning compares them: strings with the properties of its enums."""

from __future__ import annotations

from torchhal.trainer.adapters import Run


class Word(str):
    """A lower-case word, equal to and hashing like the member of Lightning's enum of that value."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str(self)

    @property
    def evaluating(self) -> bool:
        return self in ("validate", "test", "sanity_check")

    @property
    def dataloader_prefix(self) -> str:
        return "val" if self in ("validate", "sanity_check") else str(self)

    @property
    def stopped(self) -> bool:
        return self in ("finished", "interrupted")


class StateView:
    """``trainer.state``: function, stage and status of the current call."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def fn(self) -> Word | None:
        fn = self._run.state.fn
        return None if fn is None else Word(fn)

    @property
    def stage(self) -> Word | None:
        stage = self._run.state.stage
        return None if stage is None else Word(stage)

    @property
    def status(self) -> Word:
        return Word(self._run.state.status)

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        return self.status.stopped
