"""Train LightningModules, with their callbacks and loggers, by torchhal's Trainer."""

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_lightning._install import install
    from torchhal_lightning.adapter import LightningAdapter
    from torchhal_lightning.trainer import Trainer
    from torchhal_lightning.tuner import Tuner

__all__ = ["LightningAdapter", "Trainer", "Tuner", "install"]

__getattr__, __dir__ = lazy_names(
    __name__, {"LightningAdapter": "adapter", "Trainer": "trainer", "Tuner": "tuner", "install": "_install"}
)
