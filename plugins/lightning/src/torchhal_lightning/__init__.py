"""Train LightningModules, with their callbacks and loggers, by torchhal's Trainer."""

from torchhal_lightning.adapter import LightningAdapter

__all__ = ["LightningAdapter"]
