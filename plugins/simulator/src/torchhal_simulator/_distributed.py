"""Register the process-group backend: gloo underneath, device tensors on top, results delivered at ``wait()``."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchhal_simulator._device_types import Flavour

_extensions: dict[str, Any] = {}


@dataclass(frozen=True)
class CollectiveFault:
    """A fault of a collective.

    Args:
        kind: ``"slow"``, ``"fail"`` or ``"hang"``.
        call: number of the collective in its process, from 1; 0 for every one.
        rank: the global rank on which it happens, or None for all.
        seconds: how long a slow one takes at least.
    """

    kind: str
    call: int = 0
    rank: int | None = None
    seconds: float = 1.0


def register(flavour: Flavour, library: Path) -> None:
    """Give torch the backend of this flavour, from its compiled extension."""
    if not dist.is_available():
        return
    name = f"torchhal_simulator.{flavour.device_type}.backend"
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    _extensions[flavour.device_type] = extension

    def create(options: Any, backend_options: Any) -> Any:
        from torch._C._distributed_c10d import PrefixStore

        gloo = dist.ProcessGroupGloo(
            PrefixStore("simulated", options.store),
            options.group_rank,
            options.group_size,
            timeout=options.timeout,
        )
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return extension.wrap(gloo, options.group_rank, options.group_size, ranks[options.group_rank])

    dist.Backend.register_backend(flavour.backend, create, extended_api=True, devices=[flavour.device_type])


def set_fault(flavour: Flavour, fault: CollectiveFault | None) -> None:
    """Let a collective of this process fail, hang or be slow; counting starts anew."""
    extension = _extensions.get(flavour.device_type)
    if extension is None:
        return
    if fault is None:
        extension.set_fault("", 0, -1, 0.0)
    else:
        extension.set_fault(fault.kind, fault.call, -1 if fault.rank is None else fault.rank, fault.seconds)


def set_averages(flavour: Flavour, on: bool) -> None:
    """Set whether the backend of this flavour knows ReduceOp.AVG."""
    if (extension := _extensions.get(flavour.device_type)) is not None:
        extension.set_averages(on)


def collectives(flavour: str = "sim") -> int:
    """Return how many collectives this process has called since its fault was last set or taken away."""
    extension = _extensions.get(flavour)
    return 0 if extension is None else int(extension.collectives())
