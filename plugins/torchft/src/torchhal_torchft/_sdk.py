"""Check and import TorchFT, and keep its logs down."""

from __future__ import annotations

import logging
import os
from typing import Final

from torchhal.vendor_package import VendorPackage, restored_environ

TORCHFT: Final = VendorPackage(
    "torchft",
    versions=">=0.2.0,<0.3",  # those this package was tested with, as the extra ``vendor`` in pyproject.toml
    submodules=("manager", "process_group"),
    plugin="torchhal-torchft",
    install="pip install 'torchhal-torchft[vendor]'",
    needed_by="strategy 'torchft'",
)

_LOG: Final = "RUST_LOG"
"""The variable that TorchFT's Rust code reads once, when it is imported."""


def load(*, verbose: bool) -> None:
    """Import TorchFT, with a level of logging at which it prints nothing, unless ``verbose`` or RUST_LOG is set.

    By default it logs several lines in each step. The strategy prints those that matter to a user itself.
    """
    with restored_environ(_LOG):
        os.environ.setdefault(_LOG, "info" if verbose else "error")
        TORCHFT.load()
    logger = logging.getLogger("torchft")
    if logger.level == logging.NOTSET:
        # TorchFT logs a peer that dies, which this strategy is there for, as an error with a traceback.
        logger.setLevel(logging.INFO if verbose else logging.CRITICAL)
