"""List what this distribution provides, without importing torch."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl

_VENDOR = ("torch_xla",)


@hookimpl
def torchhal_accelerators() -> list[Component]:
    accelerators = "torchhal_xla.accelerator"
    return [
        # no requires: they say themselves what is missing, the version that fits this torch included
        Component("tpu", f"{accelerators}:TPUAccelerator", "Google's TPUs"),
        Component("xla", f"{accelerators}:XLAAccelerator", "the device that PJRT_DEVICE names"),
    ]


@hookimpl
def torchhal_checkpoint_ios() -> list[Component]:
    return [
        Component(
            "xla",
            "torchhal_xla.checkpoint:XLACheckpointIO",
            "torch's file, of host copies that are made in one transfer",
            requires=_VENDOR,
        )
    ]


@hookimpl
def torchhal_cluster_environments() -> list[Component]:
    return [
        Component(
            "pjrt", "torchhal_xla.environment:XLAEnvironment", "a slice of several TPU hosts, or torch_xla.launch"
        )
    ]


@hookimpl
def torchhal_strategies() -> list[Component]:
    replicas, spmd = "torchhal_xla.data_parallel:XLAStrategy", "torchhal_xla.spmd:SPMDStrategy"
    return [
        Component(
            "single_xla",
            "torchhal_xla.single:SingleXLAStrategy",
            "one process, one XLA device",
            requires=_VENDOR,
            aliases=("single_tpu",),
        ),
        Component(
            "xla",
            replicas,
            "a replica in a process per device, gradients averaged",
            {"start_method": "spawn"},
            _VENDOR,
            aliases=("tpu_spawn",),
        ),
        Component("xla_spmd", spmd, "one process, each batch divided among its devices", requires=_VENDOR),
        Component("xla_fsdp", spmd, "xla_spmd with the model divided, too", {"fsdp": True}, _VENDOR),
    ]
