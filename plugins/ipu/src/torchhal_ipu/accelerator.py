"""Train on Graphcore IPUs.

What torch holds lies on the host: poptorch takes tensors from there, and brings them back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from torchhal.accelerators import CPUAccelerator
from torchhal.capabilities import compute, store
from torchhal.plugin import Availability
from torchhal_ipu import _sdk as sdk

MIXED_INPUTS = "poptorch_mixed:float16"
"""Capability of layers that compute in the dtype of their input, whatever their weights' is."""

_MOST = 1024
"""IPUs that one process can drive; no larger system is asked for."""


class IPUAccelerator(CPUAccelerator):
    """IPUs, all of them driven by one process. ``devices=n`` is how many of them a run takes.

    torch's device is the CPU: a batch, the weights that hooks see and the results lie there. Only ``ipu_strategy``
    knows how to bring a step onto the IPU. With ``POPTORCH_IPU_MODEL=1`` there is one, which Graphcore's software
    simulates.
    """

    name: ClassVar[str] = "ipu"
    device_type: ClassVar[str] = "cpu"
    capabilities: ClassVar[frozenset[str]] = (
        compute(torch.float32, torch.float16) | store(torch.float32, torch.float16) | {MIXED_INPUTS}
    )
    indexed: ClassVar[bool] = False
    oversubscribable: ClassVar[bool] = False
    own_strategies: ClassVar[bool] = True
    default_strategy: ClassVar[str] = "ipu_strategy"
    default_parallel_strategy: ClassVar[str] = "ipu_strategy"
    auto_priority: ClassVar[int | None] = 70
    substitutes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "strategy": {"single_device": "ipu_strategy", "none": "ipu_strategy"},
        "precision": {"16-mixed": "ipu-16-mixed", "16": "ipu-16-mixed"},
    }

    def __init__(self) -> None:
        self.indices: tuple[int, ...] = ()
        """The devices that were asked for."""

    @classmethod
    def load(cls) -> None:
        """Import poptorch."""
        sdk.POPTORCH.load()

    @classmethod
    def availability(cls) -> Availability:
        try:
            cls.load()
        except KeyboardInterrupt:
            raise
        except ImportError as error:  # these are written for the user
            return Availability(False, str(error))
        except BaseException as error:  # a vendor's import may end in SystemExit
            return Availability(False, f"{type(error).__name__}: {error}")
        import poptorch

        if not _modelled() and not poptorch.ipuHardwareIsAvailable():
            return Availability(
                False,
                "poptorch is installed, but sees no IPU: `gc-info -l` lists what the driver has; POPTORCH_IPU_MODEL=1 "
                "simulates one",
            )
        return Availability(True)

    def device_count(self) -> int:
        """Return the largest number of IPUs, a power of two, that the driver gives to one process."""
        if not type(self).availability():
            return 0
        if _modelled():
            return 1
        import poptorch

        count = 1
        while count < _MOST and poptorch.ipuHardwareIsAvailable(count * 2):
            count *= 2
        return count

    def auto_device_count(self) -> int:
        return self.device_count()

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        """Return the host's device for each; the driver decides which IPUs they are."""
        self.indices = tuple(indices)
        return super().get_parallel_devices(indices)

    def setup_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"'device' must be of type 'cpu' for accelerator 'ipu' (got {device})")
        self.require_available()


def _modelled() -> bool:
    return os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0")
