"""The accelerator of {{ cookiecutter.project_name }}."""

from __future__ import annotations

from typing import ClassVar

from torchhal.accelerators import CPUAccelerator


class {{ cookiecutter.__class }}Accelerator(CPUAccelerator):
    """Accelerator that computes on the CPU until the hardware takes its place.

    For the hardware, derive from :class:`torchhal.accelerators.Accelerator` and declare what differs from its
    defaults, which ask torch's own device module::

        device_type = "..."             # torch.device("...") is valid once load() has run
        backend = "..."                 # of process groups
        capabilities = Accelerator.capabilities - {"loss_scaling"}  # what the device and its backend have
        start_methods = frozenset({"spawn", "forkserver"})

        @classmethod
        def load(cls):
            import the_vendors_module   # registers the device with torch

    To check the version of that module first, and to report why it can't be imported, load it by
    ``torchhal.vendor_package.VendorPackage``.
    """

    name: ClassVar[str] = "{{ cookiecutter.__alias }}"
    auto_priority: ClassVar[int | None] = None  # accelerator="auto" takes the highest; None: only when named
