"""ACC: random numbers of several devices of one accelerator."""

from __future__ import annotations

import torch

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext


@check("ACC-40", since="0.2", needs=["two devices"])
def generators_of_devices(context: CheckContext) -> None:
    """manual_seed seeds the generators of all devices; get_rng_state and set_rng_state are about the device given.

    Why: the state of the current device in the checkpoint of another gives two ranks the same dropout.
    Fix: pass the device on to the module's functions.
    """
    accelerator = context.accelerator()
    if not accelerator.indexed:
        raise NotApplicable("a process has one device")
    first, second = accelerator.get_parallel_devices([0, 1])
    accelerator.setup_device(first)

    def draw(device: torch.device) -> torch.Tensor:
        return torch.rand(8, device=device).cpu()

    accelerator.manual_seed(3)
    expected = draw(second)
    accelerator.manual_seed(3)
    same("the first draw on the second device after the same seed", draw(second), expected)
    kept = accelerator.get_rng_state(second).clone()
    following = draw(second)
    before = accelerator.get_rng_state(first).clone()
    accelerator.set_rng_state(kept, second)
    same("the state of the first device", accelerator.get_rng_state(first), before)
    same("the draw on the second device after set_rng_state", draw(second), following)
    draw(second)
    same("the state of the first device after draws on the second", accelerator.get_rng_state(first), before)
    require(not torch.equal(accelerator.get_rng_state(second), kept), "draws left the second device's state unchanged")
