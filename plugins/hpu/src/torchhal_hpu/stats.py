"""Log the device's statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import Callback
from torchhal_hpu.accelerator import HPUAccelerator

if TYPE_CHECKING:
    from torchhal import Trainer


class HPUStats(Callback):
    """A callback that logs the card's statistics every ``log_every_n_steps`` steps.

    Keys are ``hpu/InUse``, ``hpu/MaxInUse``, ``hpu/NumAllocs`` and the bridge's others, of global rank 0's card.
    """

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Refuse a run on another accelerator, or without a logger."""
        if not isinstance(trainer.accelerator, HPUAccelerator):
            raise ConfigurationError(f"HPUStats asks accelerator 'hpu' (the run's is {trainer.accelerator.name!r})")
        if not trainer.loggers:
            raise ConfigurationError("HPUStats needs a logger, and the Trainer has none: pass logger=True or a logger")

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every, step = trainer.log_every_n_steps, trainer.global_step
        if trainer.is_global_zero and every and step % every == 0:
            stats = trainer.accelerator.device_stats(trainer.strategy.root_device)
            for logger in trainer.loggers:
                logger.log_metrics({f"hpu/{key}": float(value) for key, value in stats.items()}, step)
