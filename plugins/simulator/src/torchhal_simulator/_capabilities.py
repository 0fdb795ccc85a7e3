"""Take capabilities from the simulated device, which has all, as some hardware lacks them."""

from __future__ import annotations

from torchhal_simulator import _distributed as distributed
from torchhal_simulator._device_types import flavour_named
from torchhal_simulator._library import load


def restrict(flavour: str = "sim", *, float64: bool = True, int64: bool = True, averages: bool = True) -> None:
    """Take what is False from a flavour, in this process and from now on; what is True is there again.

    Args:
        flavour: ``"sim"`` or ``"hpu"``; loaded if it isn't yet.
        float64: tensors of float64 and of complex numbers. Without them making one raises TypeError.
        int64: whole numbers of 64 bits. Without them int64 tensors have their dtype, and what is copied to the device
            keeps its lower 32 bits. What the device computes has 64 all the same, and they take 8 bytes.
        averages: ``ReduceOp.AVG`` in the process-group backend.
    """
    load(flavour)
    chosen = flavour_named(flavour)
    chosen.ops.set_refuse_doubles(not float64)
    chosen.ops.set_narrow_longs(not int64)
    distributed.set_averages(chosen, averages)
