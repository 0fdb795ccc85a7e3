"""Check and import fairscale, and refuse models that contain its FullyShardedDataParallel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
)


def load() -> ModuleType:
    """Return the package, with ``fairscale.nn`` and ``fairscale.optim`` imported.

    Raises:
        ConfigurationError: it is missing, of another version, or doesn't import beside this torch.
    """
    return FAIRSCALE.load()


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Take the handler away that Python gives the root logger inside, if that has none, when fairscale logs anything.

    With it, a program's own ``logging.basicConfig`` would have no effect.
    """
    before = list(logging.root.handlers)
    try:
        yield
    finally:
        for handler in list(logging.root.handlers):
            if handler not in before:
                logging.root.removeHandler(handler)


FULLY_SHARDED: Final = (
    "fairscale's FullyShardedDataParallel is not offered: it needs CUDA streams also where there is no GPU (KeyError: "
    "'all_gather'), gloo refuses its bucketed reduce_scatter, and the optimizers' state is in shards of a form of "
    "its own. Use strategy='fsdp' or 'zero3' of torchhal-parallel on the bare model, which divide parameters, "
    "gradients and optimizer state with what torch brings"
)


def check_not_fully_sharded(module: Any, alias: str) -> None:
    """Raise ConfigurationError for a module with a layer in fairscale's FullyShardedDataParallel."""
    from fairscale.nn import FullyShardedDataParallel

    for name, layer in module.named_modules():
        if isinstance(layer, FullyShardedDataParallel):
            raise ConfigurationError(
                f"strategy {alias!r} doesn't train {name or type(module).__name__!r}: {FULLY_SHARDED}"
            )
