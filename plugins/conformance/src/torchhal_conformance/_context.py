"""Context of a check that runs in this process: the component under test, an empty folder, worker processes."""

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
    """Context of one check: the component, a temporary folder, and processes to run functions in."""

    component: ComponentUnderTest
    folder: Path
    """Empty, and gone after the check."""
    _worker_pool: Callable[[int], WorkerPool]

    def create(self, **arguments: Any) -> Any:
        """Return a new instance of the component."""
        return self.component.create(**arguments)

    def accelerator(self) -> Accelerator:
        """Return the accelerator under test, or the one that the component is checked on."""
        return self.component.make_accelerator()

    def setup_accelerator(self) -> tuple[Accelerator, torch.device]:
        """Return an accelerator and its first device, which is set up in this process."""
        accelerator = self.accelerator()
        device = accelerator.get_parallel_devices([0])[0]
        accelerator.setup_device(device)
        return accelerator, device

    def generator(self, offset: int = 0) -> torch.Generator:
        """Return a generator on the CPU with the same numbers in every run of one seed."""
        return torch.Generator().manual_seed(1000 * self.component.seed + offset)

    def run_on_ranks(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 30.0
    ) -> list[Any]:
        """Run ``function(*arguments)`` in ``size`` processes, each a rank; return the values in rank order."""
        return self._worker_pool(size).run(function, *arguments, timeout=timeout)

    def restart_ranks(self, size: int) -> None:
        """Stop the ``size`` processes of :meth:`run_on_ranks`, so that the next call starts fresh ones."""
        self._worker_pool(size).stop()

    def run_in_subprocess(self, function: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> Any:
        """Run ``function(*arguments)`` in another process, which imports it by its name; return its value."""
        return self._worker_pool(1).run(function, *arguments, timeout=timeout)[0]

    def restart_subprocess(self) -> None:
        """Stop the process of :meth:`run_in_subprocess`, so that the next call starts a fresh one."""
        self._worker_pool(1).stop()
