"""The Trainer, its loops, callbacks and loggers."""

from torchhal.trainer.trainer import Trainer

__all__ = ["Trainer"]
