"""Copy batches to the device while it still computes with the one before."""

from __future__ import annotations

from typing import Any

import torch

from torchhal.accelerators import Accelerator
from torchhal.pytree import map_tensors, move_to_device, moves_itself


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in page-locked memory.

    ``Tensor.pin_memory`` alone refuses expanded tensors, and complex ones that require gradients.
    """
    # where it can, as empty_like fills what it makes with NaN under torch.use_deterministic_algorithms
    if tensor.is_contiguous() and not tensor.requires_grad:
        return tensor.pin_memory()
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


class SideStreamAccelerator(Accelerator):
    """An accelerator with streams, whose batches are copied on one of their own.

    A step only puts work into the device's queue, so the next batch arrives here while the device is still busy with
    the one before. On the stream of that work its copy would wait in the queue; on its own it runs beside it. No batch
    is asked for earlier than a plain loop asks for it, so the order of random numbers and the position in the data
    stay what they are.

    A copy runs beside the computation only from page-locked memory: a batch that isn't (a loader without
    ``pin_memory=True``) is brought there first, which costs the host about what the driver's own staging would, and
    doesn't make it wait for the device.
    """

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.Stream] = {}

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        """Return ``batch`` on ``device``, its tensors copied on a stream that the current one waits for."""
        if not non_blocking:
            return super().batch_to_device(batch, device)
        copied: list[torch.Tensor] = []

        def move(leaf: Any) -> Any:
            # what moves itself, and subclasses of tensors, may hold memory that record_stream below doesn't reach
            if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                return move_to_device(leaf, device, non_blocking=True)
            with self._module().stream(self._stream(device)):
                moved = (leaf if leaf.is_pinned() else _page_locked(leaf)).to(device, non_blocking=True)
            copied.append(moved)
            return moved

        batch = map_tensors(batch, move, is_leaf=moves_itself)
        if copied:
            current = self._module().current_stream(device)
            current.wait_stream(self._stream(device))
            for tensor in copied:  # freed while the computation has yet to read it, it must not be copied into
                tensor.record_stream(current)
        return batch

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._copying:
            # the device's own module, here and above: torch.Stream and torch.accelerator know one kind of device in a
            # process, and an extension that brings another one takes that place
            self._copying[device] = self._module().Stream(device)
        return self._copying[device]

    def teardown(self) -> None:
        self._copying.clear()
        super().teardown()
