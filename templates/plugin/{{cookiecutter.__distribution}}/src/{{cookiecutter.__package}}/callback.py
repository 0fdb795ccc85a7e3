"""The callback of {{ cookiecutter.project_name }}."""

from __future__ import annotations

from typing import Any

from torchhal import Trainer
from torchhal.trainer.callbacks import Callback


class {{ cookiecutter.__class }}Callback(Callback):
    """Callback that counts the batches of training, in this process.

    A hook that nobody overrides is never called. One that calls a collective of ``trainer.strategy`` calls it on every
    rank. To be on every run of your organisation, return the component from ``torchhal_default_callbacks`` too, and
    declare it in the entry points' group ``torchhal.defaults``.
    """

    def __init__(self) -> None:
        self.batches = 0

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self.batches = trainer.fit_loop.total_batches

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]
