"""Import Intel's bridge, without what its import leaves in the environment."""

from __future__ import annotations

import sys
from typing import Final

import torch

from torchhal.vendor_package import VendorPackage, restored_environ


class _Bridge(VendorPackage):
    """Intel's bridge, whose import checks the torch it finds, by assertions and by a look at its local version."""

    def explain(self, error: Exception) -> str:
        if isinstance(error, AssertionError):
            return _about_torch(str(error))
        if isinstance(error, AttributeError) and not torch.version.__version__.partition("+")[2]:
            return _about_torch(f"{type(error).__name__}: {error}")
        return super().explain(error)


BRIDGE: Final = _Bridge(
    "habana_frameworks.torch",
    # The first release with a torch that torchhal runs on. This package is written to the sources of 1.19.
    versions=">=1.20",
    distributions=("habana-torch-plugin",),  # not the stub, which is of 1.19
    submodules=("distributed.hccl",),
    plugin="torchhal-hpu",
    install="habana-torch-plugin comes with Intel's installer and containers, as docs.habana.ai says",
    error=ImportError,
    not_installed="the Gaudi software is not installed: {install}",
    wrong_version="{plugin} needs release 1.20 or newer of the Gaudi software, and {distribution} {version} is "
    "installed: upgrade it together with driver and torch, as docs.habana.ai says",
)


def load() -> None:
    """Import the bridge, which registers the device with torch.

    Raises:
        ImportError: it is not installed, too old, made for another torch, or doesn't load.
        RuntimeError: it came too late: torch has been asked for its accelerator before.
    """
    with restored_environ("MASTER_ADDR", "MASTER_PORT"):  # its import writes a meeting place that nobody chose
        BRIDGE.load()
    _check_accelerator()


def _about_torch(reason: str) -> str:
    message = f"habana-torch-plugin refuses torch {torch.__version__}: {reason}"
    if "Lazy" in reason or "local" in reason or "startswith" in reason:
        return f"{message}. Install the torch that came with it or, for eager mode, set PT_HPU_LAZY_MODE=0"
    return f"{message}. Install the torch that came with it"


def _check_accelerator() -> None:
    """Raise RuntimeError if torch was asked for its accelerator before the bridge was there: it keeps to its answer."""
    import habana_frameworks.torch.hpu as hpu

    if not hpu.is_available():
        return
    answer = torch.accelerator.current_accelerator()
    if answer is None or answer.type != "hpu":
        raise RuntimeError(
            f"torch was asked for its accelerator before the Gaudi software was loaded, and keeps to its answer, "
            f"{answer}: import habana_frameworks.torch, or make the Trainer, before anything that uses "
            "torch.accelerator, in a new process"
        )


def is_imported() -> bool:
    """Return True once the bridge is imported: then it has read the environment, and changes there have no effect."""
    return "habana_frameworks.torch" in sys.modules
