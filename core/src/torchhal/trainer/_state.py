"""Hold the function, stage and status of a Trainer's current call."""

from __future__ import annotations

from dataclasses import dataclass

FUNCTIONS = ("fit", "validate", "test", "predict")


@dataclass
class TrainerState:
    """Plain lower-case strings: equal to, and hashing like, the enums other code compares them with."""

    fn: str | None = None
    """fit, validate, test or predict: the latest call's; None before the first."""

    stage: str | None = None
    """train, sanity_check, validate, test or predict; None outside."""

    status: str = "initializing"
    """initializing, running, finished or interrupted."""
