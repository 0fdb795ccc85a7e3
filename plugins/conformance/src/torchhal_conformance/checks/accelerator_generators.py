"""ACC: random numbers of several devices of one accelerator, and of one that is registered after torch was seeded."""

from __future__ import annotations

import torch

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
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


@check("ACC-59", since="0.2", needs=["device"], after=("ACC-14",))
def seeded_before_it_was_loaded(context: CheckContext) -> None:
    """A seed that was set before the device is loaded decides on what the device draws; no later question seeds it.

    Asked are availability() and get_parallel_devices(), in processes that haven't used the device.

    Why: a script seeds torch in its first line, and the first Trainer registers the device: weights differ in each run.
    Fix: let load() or setup_device() seed a device that torch.manual_seed doesn't reach by torch's state on the host.
    """
    drawn = []
    try:
        for seed in (11, 11, 12):
            context.restart_subprocess()
            first, before, after = context.run_in_subprocess(_draw_after_loading, context.component, seed)
            drawn.append(first)
    finally:
        context.restart_subprocess()
    same("the first draw on a device that was loaded after torch.manual_seed(11), in two processes", *drawn[:2])
    require(drawn[2] != drawn[0], "the first draw on a device is the same after torch.manual_seed(11) and (12)")
    same("the state of the device's generator after availability() and get_parallel_devices()", after, before)


def _draw_after_loading(component: ComponentUnderTest, seed: int) -> tuple[list[float], ...]:
    """Return the first draw, and the generator's state before and after questions."""
    torch.manual_seed(seed)
    component.cls.availability()
    accelerator = component.create()
    (device,) = accelerator.get_parallel_devices([0])
    accelerator.setup_device(device)
    drawn = torch.rand(8, device=device).tolist()
    before = accelerator.get_rng_state(device).tolist()
    component.cls.availability()
    accelerator.get_parallel_devices([0])
    return drawn, before, accelerator.get_rng_state(device).tolist()
