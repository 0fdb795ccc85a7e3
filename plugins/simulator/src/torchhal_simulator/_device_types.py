"""Define the two devices that one source simulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch


@dataclass(frozen=True)
class Flavour:
    """One of torch's device types, as this package simulates it.

    Args:
        device_type: torch's name for the device.
        namespace: where the compiled library registers its own operators, ``torch.ops.<namespace>``.
        backend: name of the process-group backend.
        defines: what the C++ source is compiled with.
        indexed: whether a process may use several devices. The bridge of HPU gives a process one.
    """

    device_type: str
    namespace: str
    backend: str
    defines: tuple[str, ...]
    indexed: bool

    @property
    def ops(self) -> Any:
        """The library's own operators; valid once it is loaded."""
        return getattr(torch.ops, self.namespace)


FLAVOURS: Final = {
    "sim": Flavour("sim", "simdev", "sim", (), indexed=True),
    "hpu": Flavour("hpu", "simhpu", "hccl", ("TORCHHAL_SIM_HPU",), indexed=False),
}


def flavour_named(name: str) -> Flavour:
    """Return the flavour of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in FLAVOURS:
        raise ValueError(f"'flavour' must be one of {', '.join(map(repr, FLAVOURS))} (got {name!r})")
    return FLAVOURS[name]


_loaded: list[Flavour] = []


def loaded() -> list[Flavour]:
    """Return the device types that this process has loaded, in that order."""
    return list(_loaded)


def add_loaded(flavour: Flavour) -> None:
    """Add a device type to those of :func:`loaded`."""
    _loaded.append(flavour)
