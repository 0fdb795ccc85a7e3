"""torch's DataLoader, with batches of the combined size."""

from __future__ import annotations

from typing import Any

import torch

from poptorch.enums import DataLoaderMode
from poptorch.options import Options
from poptorch_stub.machine import Error


class DataLoader(torch.utils.data.DataLoader[Any]):
    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        assert isinstance(options, Options)
        assert mode is DataLoaderMode.Sync, "the stub loads data in the process that trains, or in torch's workers"
        if batch_sampler is not None:
            raise Error("the stub takes no batch_sampler")
        options._freeze()
        self._options = options
        combined = options.device_iterations * (options.replication_factor // options.input_group_size)
        self._combined_batch_size = batch_size * combined * options.Training.gradient_accumulation
        super().__init__(
            dataset,
            batch_size=self._combined_batch_size,
            shuffle=bool(shuffle),
            num_workers=num_workers,
            drop_last=drop_last,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            **kwargs,
        )

    @property
    def combinedBatchSize(self) -> int:
        return int(self._combined_batch_size)

    @property
    def options(self) -> Options:
        return self._options

    def terminate(self) -> None:
        pass
