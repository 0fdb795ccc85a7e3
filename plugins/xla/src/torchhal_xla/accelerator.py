"""Train on XLA devices: whatever PJRT_DEVICE names, and TPUs."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchhal.accelerators import Accelerator
from torchhal.capabilities import STANDARD, autocast, collective, compute, store
from torchhal.cluster import read_int
from torchhal.errors import AcceleratorUnavailableError, ConfigurationError, message_of
from torchhal.plugin import Availability
from torchhal_xla import _sdk as sdk

_PCI = Path("/sys/bus/pci/devices")
_NO_CHIP = "no TPU chip is attached to this machine (none is listed under /sys/bus/pci)"
_VENDOR = "0x1ae0"
_CHIPS = {"0x0027": 2, "0x005e": 1, "0x0063": 1, "0x006f": 1, "0x0056": 1, "0x0062": 1, "0x0076": 1}
"""PCI id of a TPU chip -> devices that XLA has on it. torch_xla has the same list, but asking it is importing it."""


class XLAAccelerator(Accelerator):
    """The device that PJRT has: of the kind that PJRT_DEVICE names, the CPU without it.

    A process has one ``torch.device("xla")``; which chip that is, is decided before the runtime starts, by variables.
    """

    name: ClassVar[str] = "xla"
    device_type: ClassVar[str] = "xla"
    backend: ClassVar[str] = "xla"
    capabilities: ClassVar[frozenset[str]] = (STANDARD | compute(torch.float64) | store(torch.float64)) - collective(
        "avg"
    )  # its process group has no ReduceOp.AVG
    indexed: ClassVar[bool] = False
    default_strategy: ClassVar[str] = "single_xla"
    default_parallel_strategy: ClassVar[str] = "xla_spmd"
    auto_priority: ClassVar[int | None] = None
    substitutes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "strategy": {
            "single_device": "single_xla",
            "none": "single_xla",
            "ddp": "xla",
            "ddp_spawn": "xla",
            "fsdp": "xla_fsdp",
        },
        "checkpoint_io": {"torch": "xla"},
    }
    # importing torch_xla imports torch._dynamo, and a fork after that has been seen to hang
    start_methods: ClassVar[frozenset[str]] = frozenset({"spawn", "forkserver"})
    own_strategies: ClassVar[bool] = True

    @classmethod
    def load(cls) -> None:
        """Import torch_xla, which starts no runtime, then set PJRT_DEVICE: to the CPU if nobody has set it."""
        sdk.TORCH_XLA.check()
        os.environ["PJRT_DEVICE"] = os.environ.get("PJRT_DEVICE") or cls.pjrt_device()  # an empty one is none
        handlers = list(logging.getLogger().handlers)
        sdk.TORCH_XLA.load()
        for handler in list(logging.getLogger().handlers):  # it configures the program's own logging
            if handler not in handlers:
                logging.getLogger().removeHandler(handler)

    @classmethod
    def pjrt_device(cls) -> str:
        """Return the kind of device, as PJRT names it: ``"CPU"``, ``"TPU"``, ..."""
        return os.environ.get("PJRT_DEVICE", "").split("_")[0] or ("TPU" if chips() else "CPU")

    @classmethod
    def availability(cls) -> Availability:
        """Look at metadata, variables and the list of PCI devices, and import nothing."""
        why = sdk.problem()
        if not why and cls.pjrt_device() == "TPU" and not chips():
            why = f"PJRT_DEVICE={os.environ['PJRT_DEVICE']} asks for a TPU, but {_NO_CHIP}"
        return Availability(not why, why)

    def device_count(self) -> int:
        """Return how many devices this process's runtime will have, without starting it."""
        if not type(self).availability():
            return 0
        kind = self.pjrt_device()
        if kind == "TPU":
            visible = os.environ.get("TPU_VISIBLE_CHIPS")
            found = chips()
            return sum(found[: len(visible.split(","))] if visible else found)
        return read_int(f"{kind}_NUM_DEVICES", 1) if f"{kind}_NUM_DEVICES" in os.environ else 1

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[int, ...]:
        """Parse as everywhere, but the first n only: the runtime has its devices before torch may choose."""
        indices = super().parse_devices(devices)
        if indices != tuple(range(len(indices))):
            raise ConfigurationError(
                f"'devices' must be a count for accelerator {self.name!r} (got {devices!r}): which chips a process may "
                "use is said by TPU_VISIBLE_CHIPS, before it starts"
            )
        return indices

    def setup_device(self, device: torch.device) -> None:
        """Start the runtime if it isn't running, and seed its generator.

        ``torch.manual_seed`` doesn't reach it. Its seed follows from the state of torch's generator on the host, so the
        same program with the same seed draws the same numbers, and a second run in one process draws others.
        """
        super().setup_device(device)
        self._register()
        _check_autograd(device)
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()
        self.manual_seed(int.from_bytes(digest[:8], "little"))

    def step_marker(self) -> Callable[[], None] | None:
        """Return a function that ends a graph: it compiles what was recorded, once, and runs it, without waiting.

        It is free where nothing was recorded.
        """
        import torch_xla

        sync: Callable[[], None] = torch_xla.sync
        return sync

    def synchronize(self, device: torch.device | None = None) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        torch_xla.sync()
        xm.wait_device_ops()

    def empty_cache(self) -> None:
        """Do nothing: the runtime has no cache to give back."""

    def manual_seed(self, seed: int) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed % (1 << 64))  # which is what torch makes of a negative one

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return eight bytes, the seed from which the next random operator's is derived, without waiting."""
        import torch_xla.core.xla_model as xm

        return torch.tensor(list(xm.get_rng_state().to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.manual_seed(int.from_bytes(bytes(state.tolist()), "little"))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise the runtime's status ``RESOURCE_EXHAUSTED`` too."""
        return super().is_out_of_memory(error) or (
            isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in message_of(error)
        )

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Return the statistics of the device's runtime; empty on the CPU, where it keeps no count."""
        import torch_xla.core.xla_model as xm

        if self.pjrt_device() == "CPU":
            return {}
        info: Any = xm.get_memory_info(device)
        stats = {"allocated": "bytes_used", "peak": "peak_bytes_used", "limit": "bytes_limit"}
        return {name: int(info[key]) for name, key in stats.items() if key in info}

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Do nothing: the runtime can't reset its peak, which is that of the process."""


class TPUAccelerator(XLAAccelerator):
    """TPUs, on a host that has them."""

    name: ClassVar[str] = "tpu"
    capabilities: ClassVar[frozenset[str]] = (
        compute(torch.float32, torch.bfloat16)
        | store(torch.float32, torch.bfloat16)
        | autocast(torch.bfloat16)
        | collective("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    )
    default_parallel_strategy: ClassVar[str] = "xla"
    auto_priority: ClassVar[int | None] = 80

    @classmethod
    def availability(cls) -> Availability:
        if not chips():
            return Availability(False, _NO_CHIP)
        if (kind := os.environ.get("PJRT_DEVICE") or "TPU") != "TPU":
            return Availability(False, f"PJRT_DEVICE={kind} in the environment asks for another device")
        found = super().availability()
        if found and not os.environ.get("TPU_LIBRARY_PATH") and find_spec("libtpu") is None:
            return Availability(False, "libtpu is not installed: pip install 'torch_xla[tpu]'")
        return found


def _check_autograd(device: torch.device) -> None:
    """Raise unless a backward reaches the device: torch counts devices once, at the first backward of a process."""
    probe = torch.zeros((), device=device, requires_grad=True)
    try:
        (probe + 1).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = (
            "this process ran a backward before its first XLA device was there, and torch's autograd looks for devices "
            "only once: make one first (torch.zeros(1, device='xla')), or train in a process of its own"
        )
        raise AcceleratorUnavailableError(f"accelerator 'xla': {reason}", alias="xla", reason=reason) from error


def chips() -> list[int]:
    """Return, for each TPU chip on this machine, how many devices XLA has on it."""
    found = []
    for vendor in sorted(_PCI.glob("*/vendor")):
        if vendor.read_text().strip() == _VENDOR:
            devices = _CHIPS.get((vendor.parent / "device").read_text().strip())
            if devices is not None:
                found.append(devices)
    return found
