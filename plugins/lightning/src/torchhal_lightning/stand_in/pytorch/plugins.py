"""Lightning's precisions, checkpoint IOs and cluster environments, as names for torchhal's."""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch import nn

from torchhal.checkpoint import TorchCheckpointIO as _TorchCheckpointIO
from torchhal_lightning.stand_in._missing import missing


class Precision:
    """Names a precision. For another one, subclass torchhal.precision.Precision."""

    precision: Any = "32-true"


class MixedPrecision(Precision):
    """``16-mixed`` or ``bf16-mixed``.

    Args:
        precision: one of the two.
        device: to compute on; the accelerator's counts.
        scaler: of the gradients of float16.
    """

    def __init__(self, precision: str, device: str = "cpu", scaler: torch.amp.GradScaler | None = None) -> None:
        self.precision = precision
        self.device = device
        self.scaler = scaler


class HalfPrecision(Precision):
    """``16-true`` or ``bf16-true``."""

    def __init__(self, precision: str = "16-true") -> None:
        self.precision = precision


class DoublePrecision(Precision):
    """``64-true``."""

    precision = "64-true"


class FSDPPrecision(Precision):
    """Any precision, for the strategies that shard parameters."""

    def __init__(self, precision: str, scaler: Any = None) -> None:
        self.precision = precision
        self.scaler = scaler


class DeepSpeedPrecision(Precision):
    """Any precision, for DeepSpeed."""

    def __init__(self, precision: str) -> None:
        self.precision = precision


class XLAPrecision(Precision):
    """Any precision, for XLA."""

    def __init__(self, precision: str = "32-true") -> None:
        self.precision = precision


class CheckpointIO:
    """Reads and writes checkpoints; a subclass defines these methods."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} must define save_checkpoint(checkpoint, path)")

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read one."""
        raise NotImplementedError(f"{type(self).__name__} must define load_checkpoint(path)")

    def remove_checkpoint(self, path: Any) -> None:
        """Remove one."""
        raise NotImplementedError(f"{type(self).__name__} must define remove_checkpoint(path)")

    def teardown(self) -> None:
        """Finish what is under way."""


class TorchCheckpointIO(CheckpointIO):
    """torchhal's ``torch``, for a script that calls it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        _TorchCheckpointIO().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return _TorchCheckpointIO().load_checkpoint(
            path, map_location="cpu" if map_location is None else map_location, weights_only=weights_only is not False
        )

    def remove_checkpoint(self, path: Any) -> None:
        _TorchCheckpointIO().remove_checkpoint(path)


class XLACheckpointIO(TorchCheckpointIO):
    """torchhal's ``xla``."""


class AsyncCheckpointIO(CheckpointIO):
    """torchhal's ``async``.

    Args:
        checkpoint_io: that writes; torch's by default.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io


class ClusterEnvironment:
    """Describes the processes of a job; a subclass defines what torchhal's environments don't know."""

    @property
    def creates_processes_externally(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must define creates_processes_externally")

    @property
    def main_address(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} must define main_address")

    @property
    def main_port(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define main_port")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define world_size()")

    def set_world_size(self, size: int) -> None:
        """Take note of it."""

    def global_rank(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define global_rank()")

    def set_global_rank(self, rank: int) -> None:
        """Take note of it."""

    def local_rank(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define local_rank()")

    def node_rank(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define node_rank()")

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise an error for numbers that the job hasn't."""

    def teardown(self) -> None:
        """Clean up."""


class LightningEnvironment(ClusterEnvironment):
    """torchhal's ``local``."""


class SLURMEnvironment(ClusterEnvironment):
    """torchhal's ``slurm``.

    Args:
        auto_requeue: whether the job is requeued when its time is over.
        requeue_signal: that Slurm sends then.
    """

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal


class TorchElasticEnvironment(ClusterEnvironment):
    """torchhal's ``torchelastic``."""


class LSFEnvironment(ClusterEnvironment):
    """torchhal's ``lsf``."""


class KubeflowEnvironment(ClusterEnvironment):
    """torchhal's ``kubeflow``."""


class MPIEnvironment(ClusterEnvironment):
    """torchhal's ``openmpi`` or ``mpich``."""


class XLAEnvironment(ClusterEnvironment):
    """torchhal's ``pjrt``."""


class LayerSync:
    """Base of what synchronizes batch norms."""


class TorchSyncBatchNorm(LayerSync):
    """``Trainer(sync_batchnorm=True)``."""

    def apply(self, model: nn.Module) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return, no-untyped-call]

    def revert(self, model: nn.Module) -> nn.Module:
        return model


_INSTEAD = "`torchhal plugins` lists the precisions that there are."
BitsandbytesPrecision = missing("BitsandbytesPrecision", _INSTEAD)
TransformerEnginePrecision = missing("TransformerEnginePrecision", _INSTEAD)
