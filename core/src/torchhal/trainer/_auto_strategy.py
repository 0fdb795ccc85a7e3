"""Hold what strategy="auto" and batch_size="auto" were asked with, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchhal.resolve import Plan, Request


@dataclass
class AutoStrategy:
    """The choices that are left to the planner: of a strategy, of a batch size, or of both.

    Attributes:
        request: the Trainer's hardware arguments.
        finds_batch_size: the batches of the training loader are to be as large as fits.
        base: the plan with the default strategy, before any run; None until the first fit.
        decision: rank 0's, as plain data; None where the default strategy stays.
    """

    request: Request
    finds_batch_size: bool = False
    base: Plan | None = None
    decision: dict[str, Any] | None = None

    @property
    def fuses_optimizers(self) -> bool:
        """Whether optimizers step by fused kernels."""
        return self.decision is not None and bool(self.decision["fused"])

    @property
    def batches(self) -> int:
        """Batches of a step for each of the default strategy, which has more replicas."""
        return 1 if self.decision is None else int(self.decision["batches"])


def default_decision(base: Plan) -> dict[str, Any]:
    """Return the decision for the default strategy."""
    alias = base.strategy.alias
    return {
        "alias": alias,
        "options": {},
        "name": alias,
        "fused": False,
        "batches": 1,
        "reason": "",
        "tried": False,
        "batch_size": 0,
    }
