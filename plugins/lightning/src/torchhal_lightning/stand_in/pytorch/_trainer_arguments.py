"""The arguments of the Trainer and of its methods, with the types that a command line makes options of."""

# No postponed annotations: whoever reads them is to find types.

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

from torchhal_lightning.stand_in.pytorch.accelerators import Accelerator
from torchhal_lightning.stand_in.pytorch.callbacks import Callback
from torchhal_lightning.stand_in.pytorch.loggers import Logger
from torchhal_lightning.stand_in.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from torchhal_lightning.stand_in.pytorch.profilers import Profiler
from torchhal_lightning.stand_in.pytorch.strategies import Strategy

_Plugin = Precision | ClusterEnvironment | CheckpointIO | LayerSync | str
_Path = str | os.PathLike[str]


class Arguments:
    """Methods without a body; their signatures are those of the Trainer's."""

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy | dict[str, Any] = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: _Plugin | list[_Plugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: _Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None: ...

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: _Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a model."""

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: _Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any]:
        """Evaluate on the validation data."""
        return []

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: _Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any]:
        """Evaluate on the test data."""
        return []

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: _Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Return the predictions."""
        return None
