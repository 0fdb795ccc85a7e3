"""State words of a Trainer as Lightning compares them: strings with the properties of its enums."""

from __future__ import annotations

from torchhal.trainer.adapters import RunState


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

    def __init__(self, run: RunState) -> None:
        self._run = run

    @property
    def fn(self) -> Word | None:
        fn = self._run.state.fn
        return None if fn is None else Word(fn)

    @fn.setter
    def fn(self, value: str | None) -> None:
        self._run.state.fn = _plain(value)

    @property
    def stage(self) -> Word | None:
        stage = self._run.state.stage
        return None if stage is None else Word(stage)

    @stage.setter
    def stage(self, value: str | None) -> None:
        self._run.state.stage = _plain(value)

    @property
    def status(self) -> Word:
        return Word(self._run.state.status)

    @status.setter
    def status(self, value: str) -> None:
        self._run.state.status = _plain(value) or ""

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        return self.status.stopped

    def __eq__(self, other: object) -> bool:
        """Whether another state, also one of Lightning's, is the same."""
        return all(getattr(self, name) == getattr(other, name, None) for name in ("fn", "stage", "status"))

    __hash__ = None  # type: ignore[assignment]


def _plain(value: str | None) -> str | None:
    """Return the word of an enum's member of Lightning's, or of a string."""
    return None if value is None else str(getattr(value, "value", value))
