"""Sound components, from which those of the modules named blind_* differ in one thing each."""

import os
import signal

import torch
import torch.distributed as dist

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import ClusterEnvironment, port_from_job_id, read_address, read_int, read_text
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError
from torchhal.precision import MixedPrecision, TruePrecision
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
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
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
