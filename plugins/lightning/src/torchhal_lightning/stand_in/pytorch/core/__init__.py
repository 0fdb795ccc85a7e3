"""LightningModule and LightningDataModule, as torchhal's Module and DataModule under Lightning's names."""

from torchhal.trainer.adapters import HasHyperparameters as HyperparametersMixin
from torchhal_lightning.stand_in.pytorch.core.datamodule import LightningDataModule
from torchhal_lightning.stand_in.pytorch.core.module import LightningModule
from torchhal_lightning.stand_in.pytorch.core.optimizer import LightningOptimizer

__all__ = ["HyperparametersMixin", "LightningDataModule", "LightningModule", "LightningOptimizer"]
