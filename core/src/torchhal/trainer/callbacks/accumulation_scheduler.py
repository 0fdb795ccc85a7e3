"""Change the number of batches per optimizer step from epoch to epoch, with GradientAccumulationScheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchhal._arguments import check_count
from torchhal.errors import ConfigurationError
from torchhal.precision.base import needs_closure
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class GradientAccumulationScheduler(Callback):
    """Callback that sets ``accumulate_grad_batches`` when an epoch begins.

    ``trainer.estimated_stepping_batches`` counts by it. A learning rate stays as it is, though a step takes more.

    Args:
        scheduling: the epoch, from 0, from which on so many batches make one optimizer step: ``{0: 8, 4: 4, 8: 1}``.
            Without an entry for epoch 0 it is 1 until the first one.

    Raises:
        TypeError, ConfigurationError: what is no such dict. In ``setup`` and ``on_fit_start``: beside
            ``Trainer(accumulate_grad_batches=...)``, with manual optimization, with an optimizer that evaluates a batch
            several times, and under a strategy that accumulates by itself or can't change it.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not isinstance(scheduling, Mapping) or not scheduling:
            raise TypeError(f"'scheduling' must be a dict {{epoch: batches}} with an entry (got {scheduling!r})")
        given = {
            check_count("an epoch of scheduling", epoch, minimum=0): check_count(
                f"scheduling[{epoch}]", batches, minimum=1
            )
            for epoch, batches in scheduling.items()
        }
        self.scheduling = {0: 1, **given}
        self.epochs = sorted(self.scheduling)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches per optimizer step in ``epoch``, which counts from 0."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"'accumulate_grad_batches' must be 1 beside a {type(self).__name__}, which sets it (got "
                f"{trainer.accumulate_grad_batches}): leave one of the two out"
            )
        # Before the strategy sets up its steps for one batch.
        if max(self.scheduling.values()) == 1:
            return
        if not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{type(self).__name__} needs automatic optimization: {type(module).__name__}.training_step steps the "
                "optimizers itself, and decides there how many batches a step takes"
            )
        strategy = trainer.strategy
        if {"owns_accumulation", "owns_step"} & set(strategy.features):
            raise ConfigurationError(
                f"{type(self).__name__} can't be used with strategy {strategy.display_name!r}, which sets its steps up "
                "once for a fit: give one number, Trainer(accumulate_grad_batches=...), or use another strategy"
            )

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """Raise ConfigurationError now for what a later epoch would need."""
        for batches in set(self.scheduling.values()):
            if batches > 1 and any(map(needs_closure, trainer.optimizers)):
                raise ConfigurationError(
                    f"{type(self).__name__} can't be used with an optimizer that evaluates a batch several times "
                    f"within a step (scheduling={self.scheduling})"
                )
            trainer.strategy.check_accumulation(batches)

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)
