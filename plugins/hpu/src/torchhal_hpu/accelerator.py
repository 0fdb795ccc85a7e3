"""Train on Intel Gaudi: torch's device ``hpu``, through Intel's bridge."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from torchhal.accelerators import Accelerator
from torchhal.capabilities import autocast, collective, compute, store
from torchhal.errors import message_of
from torchhal.plugin import Availability
from torchhal_hpu import _sdk as sdk
from torchhal_hpu._card_assignment import CardAssignment

AUTOCAST_LISTS = "habana_autocast_lists"
"""Capability of autocast with lists of operators, which the bridge reads from files."""

TRANSFORMER_ENGINE = "habana_transformer_engine"
"""Capability of float8 layers of Intel's transformer engine."""


class HPUAccelerator(Accelerator):
    """Gaudi cards, one per process. Indices count the modules that ``HABANA_VISIBLE_MODULES`` leaves visible.

    In lazy mode (``PT_HPU_LAZY_MODE=1``, the bridge's default in release 1.19) operators are recorded, and run when a
    step mark says so: after each backward, after each optimizer step, and before each step without training (after it
    with strategies that aren't of this package). In eager mode there are no marks.
    """

    name: ClassVar[str] = "hpu"
    device_type: ClassVar[str] = "hpu"
    backend: ClassVar[str] = "hccl"
    indexed: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[str]] = (
        compute(torch.float32, torch.bfloat16)
        | store(torch.float32, torch.bfloat16)
        | autocast(torch.bfloat16)
        | collective("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # hccl has no average
        | {AUTOCAST_LISTS, TRANSFORMER_ENGINE}
    )
    default_strategy: ClassVar[str] = "hpu_single"
    default_parallel_strategy: ClassVar[str] = "hpu_parallel"
    auto_priority: ClassVar[int | None] = 70
    start_methods: ClassVar[frozenset[str]] = frozenset({"spawn", "forkserver"})
    visible_devices: ClassVar[str] = "HABANA_VISIBLE_MODULES"
    features: ClassVar[frozenset[str]] = frozenset({"memory_stats", "visible_devices"})
    substitutes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "strategy": {"single_device": "hpu_single", "none": "hpu_single", "ddp": "hpu_parallel"},
        "precision": {"fp8": "hpu-fp8"},
        "checkpoint_io": {"torch": "hpu"},
    }

    def __init__(self) -> None:
        self._place = CardAssignment()

    @classmethod
    def load(cls) -> None:
        """Import the bridge, before anybody asks torch for its accelerator, and before ``PT_HPU_*`` is of use."""
        sdk.load()

    @classmethod
    def availability(cls) -> Availability:
        try:
            cls._register()
        except KeyboardInterrupt:
            raise
        except (ImportError, RuntimeError) as error:  # these are written for the user
            return Availability(False, str(error) or type(error).__name__)
        except BaseException as error:  # a vendor's import may end in SystemExit
            return Availability(False, f"{type(error).__name__}: {error}")
        import habana_frameworks.torch.hpu as hpu

        if not hpu.is_available():
            return Availability(
                False, "the Gaudi software is installed, but sees no device: `hl-smi` shows what the driver has"
            )
        return Availability(True)

    def device_count(self) -> int:
        visible = [module for module in os.environ.get("HABANA_VISIBLE_MODULES", "").split(",") if module.strip()]
        there = super().device_count()
        return min(there, len(visible)) if visible else there

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        """Return ``hpu`` for each index; each process finds its visible module when it is set up."""
        self._place.indices = tuple(indices)
        return super().get_parallel_devices(indices)

    def setup_process(self, *, global_rank: int, local_rank: int, world_size: int) -> None:
        if world_size > 1:
            self.require_available()
            self._place.join(global_rank=global_rank, local_rank=local_rank, world_size=world_size)

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        if not self._place.joined:
            self._place.alone()
        import habana_frameworks.torch.hpu as hpu

        hpu.init()  # before it torch.utils.checkpoint doesn't keep the device's random state

    def step_marker(self) -> Callable[[], None] | None:
        import habana_frameworks.torch.core as htcore

        return htcore.mark_step if htcore.is_lazy() else None

    def teardown(self) -> None:
        self._place.leave()
        super().teardown()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise the bridge's message, ``MODULE:PT_DEVMEM Allocation failed for size::...``, too."""
        return super().is_out_of_memory(error) or (
            isinstance(error, RuntimeError) and "PT_DEVMEM Allocation failed" in message_of(error)
        )

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Return ``allocated`` and ``peak`` by tensors, and the ``limit`` of the device."""
        stats = _bridge_stats(device)
        return {"allocated": stats["InUse"], "peak": stats["MaxInUse"], "limit": stats["Limit"]}

    def device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the bridge's statistics under its own keys beside ``utilization_percent``, where ``pyhlml`` is there.

        ``Limit``, ``InUse`` and ``MaxInUse`` in bytes, ``NumAllocs``, ``NumFrees``, ...
        (``habana_frameworks.torch.hpu.memory.memory_stats``).
        """
        stats = super().device_stats(device)
        try:
            stats.update((key, float(value)) for key, value in _bridge_stats(device).items())
        except Exception:  # no card, or another process has it
            return stats
        return stats


def _bridge_stats(device: torch.device) -> dict[str, int]:
    import habana_frameworks.torch.hpu as hpu

    stats: dict[str, int] = hpu.memory_stats(None if device.index is None else device)
    return stats
