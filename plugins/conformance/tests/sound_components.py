"""Sound components, from which those of the modules named blind_* differ in one thing each."""

import copy
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO, inspect_contents, location_of
from torchhal.cluster import ClusterEnvironment, port_from_job_id, read_address, read_int, read_text
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError
from torchhal.precision import MixedPrecision, TruePrecision
from torchhal.pytree import map_tensors
from torchhal.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy


class SameCPU(CPUAccelerator):
    """core's CPU, by another name."""

    name = "same_cpu"
    auto_priority = None


class _Aliased:
    own_alias = ""

    def __init__(self):
        super().__init__(self.width)
        self.alias = self.own_alias


class SameMixed16(_Aliased, MixedPrecision):
    """16-mixed, by another name."""

    own_alias, width = "same_mixed16", "float16"


class SameMixedBf16(_Aliased, MixedPrecision):
    """bf16-mixed, by another name."""

    own_alias, width = "same_mixed_bf16", "bfloat16"


class SameTrueBf16(_Aliased, TruePrecision):
    """bf16-true, by another name."""

    own_alias, width = "same_true_bf16", "bfloat16"


class SameTorch(TorchCheckpointIO):
    """core's checkpoint IO, by another name."""


class ThreadedTorch(TorchCheckpointIO):
    """core's checkpoint IO as an asynchronous one: a save copies every value, and a thread writes it."""

    features: ClassVar[frozenset[str]] = (TorchCheckpointIO.features | {"async"}) - {"streaming"}

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []

    def _copied(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        detached = map_tensors(checkpoint, lambda leaf: leaf.detach() if has_graph(leaf) else leaf)
        copied: dict[str, Any] = copy.deepcopy(detached)
        return copied

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(checkpoint, dict):
            raise TypeError(f"'checkpoint' must be a dict (got {type(checkpoint).__name__})")
        location_of(path, self.storage_options, storage_options)
        inspect_contents(checkpoint)
        copied = self._copied(checkpoint)
        self._join()
        save = super().save_checkpoint
        self._start(lambda: save(copied, path, storage_options=storage_options))

    def _start(self, work: Callable[[], None]) -> None:
        errors = self._errors

        def run() -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)

        self._thread = threading.Thread(target=run, name="checkpoint save")
        self._thread.start()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        self._join()
        if self._errors:
            raise self._errors.pop(0)

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        self._join()
        return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def open_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        self._join()
        return super().open_checkpoint(path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._join()
        super().remove_checkpoint(path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        self._join()
        return super().exists(path)

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> list[str]:
        self._join()
        return super().list_checkpoints(folder)

    def saved_ns(self, path: str | os.PathLike[str]) -> int:
        self._join()
        return super().saved_ns(path)

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        self._join()
        return super().link_checkpoint(source, target)

    def __getstate__(self) -> dict[str, Any]:
        self._join()
        return {**self.__dict__, "_errors": []}


def has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_leaf


class AcmeEnvironment(ClusterEnvironment):
    """The environment of docs/how-to/write-an-environment.md."""

    name = "acme_run"
    priority = 62

    def __init__(self):
        self.stop_signals = [signal.SIGUSR1]

    @classmethod
    def detect(cls):
        return launched_by() is None and bool(os.environ.get("ACME_TASK", "").strip())

    @property
    def creates_processes_externally(self):
        return True

    def world_size(self):
        return read_int("ACME_TASKS", 1, hint="acme-run sets it")

    def global_rank(self):
        return read_int("ACME_TASK", 0, self.world_size() - 1)

    def local_rank(self):
        return read_int("ACME_LOCAL_TASK", 0, self.local_world_size() - 1)

    def local_world_size(self):
        return read_int("ACME_LOCAL_TASKS", 1, self.world_size())

    def node_rank(self):
        return read_int("ACME_NODE", 0, self.num_nodes() - 1)

    def num_nodes(self):
        return read_int("ACME_NODES", 1, self.world_size())

    @property
    def main_address(self):
        return read_address("ACME_HEAD")

    @property
    def main_port(self):
        return port_from_job_id(self.job_id())

    def job_id(self):
        return read_text("ACME_JOB_ID")

    def validate_settings(self, *, num_devices, num_nodes):
        rank, local_rank, node = self.global_rank(), self.local_rank(), self.node_rank()  # refused if out of bounds
        if local_rank > rank or node > rank:
            raise ConfigurationError(
                f"acme-run's variables contradict each other: ACME_TASK={rank}, ACME_LOCAL_TASK={local_rank}, "
                f"ACME_NODE={node}"
            )
        for what, started, asked in (
            ("processes on this node", self.local_world_size(), num_devices),
            ("nodes", self.num_nodes(), num_nodes),
        ):
            if started != asked:
                raise ConfigurationError(
                    f"acme-run started {started} {what}, and the Trainer asks for {asked}: make both the same, or say "
                    "devices='auto' and num_nodes='auto'"
                )


class SameDDP(DDPStrategy):
    """core's ddp, by another name."""


class FlatAverage(ParallelStrategy):
    """The strategy of docs/how-to/write-a-strategy.md: gradients are averaged after each backward, in one message."""

    synchronizes_batchnorms = True
    compares_replicas = True

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        self.average_gradients()

    def average_gradients(self):
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:  # another rank may have used it: all send the same parameters
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with self.guard("averaging of the gradients"):
            dist.all_reduce(flat)
        flat /= self.world_size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class SameSingle(SingleDeviceStrategy):
    """core's single_device, by another name."""


TABLES = [
    {
        "ACME_TASK": "0",
        "ACME_TASKS": "4",
        "ACME_LOCAL_TASK": "0",
        "ACME_LOCAL_TASKS": "2",
        "ACME_NODE": "0",
        "ACME_NODES": "2",
        "ACME_HEAD": "n1",
        "ACME_JOB_ID": "4711",
    },
    {
        "ACME_TASK": "1",
        "ACME_TASKS": "4",
        "ACME_LOCAL_TASK": "1",
        "ACME_LOCAL_TASKS": "2",
        "ACME_NODE": "0",
        "ACME_NODES": "2",
        "ACME_HEAD": "n1",
        "ACME_JOB_ID": "4711",
    },
    {
        "ACME_TASK": "2",
        "ACME_TASKS": "4",
        "ACME_LOCAL_TASK": "0",
        "ACME_LOCAL_TASKS": "2",
        "ACME_NODE": "1",
        "ACME_NODES": "2",
        "ACME_HEAD": "n1",
        "ACME_JOB_ID": "4711",
    },
    {
        "ACME_TASK": "3",
        "ACME_TASKS": "4",
        "ACME_LOCAL_TASK": "1",
        "ACME_LOCAL_TASKS": "2",
        "ACME_NODE": "1",
        "ACME_NODES": "2",
        "ACME_HEAD": "n1",
        "ACME_JOB_ID": "4711",
    },
]
