"""Check and import poptorch."""

from __future__ import annotations

from typing import Final

import torch

from torchhal.vendor_package import VendorPackage


class _PopTorch(VendorPackage):
    """poptorch, whose import asserts that it finds the torch it was built for."""

    def explain(self, error: Exception) -> str:
        if isinstance(error, AssertionError):
            return (
                f"poptorch refuses torch {torch.__version__}: {error}. Build it for this torch, as the README of "
                "torchhal-ipu says"
            )
        return super().explain(error)


POPTORCH: Final = _PopTorch(
    "poptorch",
    versions=">=3.3",  # whose API this package is written to
    distributions=("poptorch", "poptorch-stub"),
    plugin="torchhal-ipu",
    install="it comes with Graphcore's Poplar SDK, as the README of torchhal-ipu says",
    error=ImportError,
    not_installed="poptorch is not installed: {install}",
    wrong_version="{plugin} needs poptorch {versions} (found {distribution} {version}): install the one of a newer "
    "Poplar SDK",
)
