"""Check and import fairscale, and refuse models that contain its FullyShardedDataParallel."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage

FAIRSCALE: Final = VendorPackage(
    "fairscale",
    versions="==0.4.13",  # whose sources this package was written to, and the last that was released
    submodules=("nn", "optim"),
    plugin="torchhal-fairscale",
    install="pip install 'torchhal-fairscale[vendor]'",
    needed_by="the strategies of torchhal-fairscale",
)


def load() -> ModuleType:
    """Return the package, with ``fairscale.nn`` and ``fairscale.optim`` imported.

    Raises:
        ConfigurationError: it is missing, of another version, or doesn't import beside this torch.
    """
    return FAIRSCALE.load()


def check_not_fully_sharded(module: Any, alias: str) -> None:
    """Raise ConfigurationError for a module with a layer in fairscale's FullyShardedDataParallel."""
    from fairscale.nn import FullyShardedDataParallel

    for name, layer in module.named_modules():
        if isinstance(layer, FullyShardedDataParallel):
            raise ConfigurationError(
                f"strategy {alias!r} doesn't train {name or type(module).__name__!r}, which is in fairscale's "
                f"FullyShardedDataParallel: {FSDP_PROBLEM}. Use strategy='fsdp' or 'zero3' on the bare layer, which "
                "divide parameters, gradients and optimizer state with what torch brings"
            )


FSDP_PROBLEM: Final = (
    "it uses CUDA streams also where there is no GPU (KeyError: 'all_gather'), and keeps the weights in flat "
    "parameters, for which no optimizer's state and no checkpoint is portable"
)
