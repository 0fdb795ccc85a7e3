"""Check by metadata that torch_xla fits this torch: importing one that doesn't ends in undefined symbols."""

from __future__ import annotations

from typing import Final

from torchhal.vendor_package import VendorPackage

SUPPORTED: Final = "2.9"

TORCH_XLA: Final = VendorPackage(
    "torch_xla",
    versions=f"=={SUPPORTED}.*",
    plugin="torchhal-xla",
    install="pip install torchhal-xla[vendor]",
    follows_torch=True,
    error=ImportError,
    not_installed="torch_xla is not installed; it needs a torch of its own version: {install} in an environment with "
    f"torch {SUPPORTED} (this one has torch {{torch}})",
    wrong_version=f"{{plugin}} is written for torch_xla {SUPPORTED} (got {{version}}): {{install}}",
)


def problem() -> str:
    """Return why torch_xla can't be used here, or an empty string."""
    return TORCH_XLA.problem()
