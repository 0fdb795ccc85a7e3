"""What a check that runs in this process gets: the part under test, an empty folder, another process to ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchhal.accelerators import Accelerator
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._worker_pool import WorkerPool


@dataclass(frozen=True)
class CheckContext:
    """The place where one check is made."""

    subject: ComponentUnderTest
    folder: Path
    """Empty, and gone after the check."""
    _world: Callable[[int], WorkerPool]

    def make(self, **arguments: Any) -> Any:
        """A new instance of the part."""
        return self.subject.create(**arguments)

    def accelerator(self) -> Accelerator:
        """The accelerator under test, or the one that the part is checked on."""
        return self.subject.make_accelerator()

    def ready(self) -> tuple[Accelerator, torch.device]:
        """An accelerator, and its first device, which it has selected in this process."""
        accelerator = self.accelerator()
        device = accelerator.get_parallel_devices([0])[0]
        accelerator.setup_device(device)
        return accelerator, device

    def generator(self, offset: int = 0) -> torch.Generator:
        """Random numbers on the CPU, the same in every run of one seed."""
        return torch.Generator().manual_seed(1000 * self.subject.seed + offset)

    def ranks(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> list[Any]:
        """``function(*arguments)`` in ``size`` processes, each a rank; the values in rank order."""
        return self._world(size).run(function, *arguments, timeout=timeout)

    def elsewhere(self, function: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> Any:
        """``function(*arguments)`` in another process, which finds it by its name; its value."""
        return self._world(1).run(function, *arguments, timeout=timeout)[0]

    def fresh(self) -> None:
        """Let the next :meth:`elsewhere` find a process in which nothing has happened."""
        self._world(1).stop()
