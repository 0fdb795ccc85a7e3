"""LightningDataModule: torchhal's DataModule with what Lightning's has beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchhal
from torchhal.pytree import move_to_device
from torchhal_lightning.stand_in.pytorch.core._initial import InitialHyperparameters


class LightningDataModule(InitialHyperparameters, torchhal.DataModule):
    """Base class of data modules that were written for Lightning."""

    name: str | None = None
    prepare_data_per_node = True
    allow_zero_length_dataloader_with_multiple_devices = False

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        val_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> LightningDataModule:
        """Return a data module of datasets.

        Args:
            train_dataset: one, or several in a sequence or a mapping.
            val_dataset: one or several.
            test_dataset: the same.
            predict_dataset: the same.
            batch_size: of all loaders.
            num_workers: the same.
            datamodule_kwargs: arguments of the class.
        """

        def loader(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, Mapping):
                return {name: loader(each, shuffle) for name, each in dataset.items()}
            if isinstance(dataset, Sequence):
                return [loader(each, shuffle) for each in dataset]
            shuffle &= not isinstance(dataset, IterableDataset)
            return DataLoader(
                dataset, batch_size, shuffle=shuffle, num_workers=num_workers, pin_memory=torch.cuda.is_available()
            )

        made = cls(**datamodule_kwargs)
        for stage, dataset in (
            ("train", train_dataset), ("val", val_dataset), ("test", test_dataset), ("predict", predict_dataset)
        ):  # fmt: skip
            if dataset is not None:
                setattr(made, f"{stage}_dataloader", partial(loader, dataset, stage == "train"))
        return made
