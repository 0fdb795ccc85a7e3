"""Check and import Colossal-AI, without what its import changes in the process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Final

import torch

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage, restored_environ

IMPORTED: Final = (
    "transformers", "peft", "accelerate", "bitsandbytes", "galore_torch", "einops", "numpy", "packaging", "pillow",
    "psutil", "rich", "safetensors", "tqdm",
)  # fmt: skip
"""The distributions that ``colossalai.booster`` imports; the extra ``vendor`` in pyproject.toml has their versions."""

_INSTALL: Final = "pip install 'torchhal-colossalai[vendor]', then pip install --no-deps colossalai==0.5.0"


class _ColossalAI(VendorPackage):
    """Colossal-AI, which is installed without its requirements, so that some of these may be missing."""

    def problem(self) -> str:
        if problem := super().problem():
            return problem
        missing = [name for name in IMPORTED if not _is_installed(name)]
        if not missing:
            return ""
        are = "are" if len(missing) > 1 else "is"
        return f"{self.needed_by} needs {', '.join(missing)}, which colossalai imports and {are} missing: {_INSTALL}"


COLOSSALAI: Final = _ColossalAI(
    "colossalai",
    versions="==0.5.0",  # whose sources this package was written to, and the last that was released
    submodules=("booster", "booster.plugin", "zero", "cluster"),
    plugin="torchhal-colossalai",
    install=_INSTALL,
    needed_by="strategy 'colossalai'",
)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def load() -> Any:
    """Import Colossal-AI and return the module.

    Its import takes some seconds. It sets CUDA_DEVICE_MAX_CONNECTIONS, a filter for warnings of torch's schedulers, and
    by ``torch.compile`` the validation of ``torch.distributions`` off; these are set back.

    Raises:
        ConfigurationError: it is missing, of another version, or can't be imported with this torch.
    """
    COLOSSALAI.check()
    with _quiet(), restored_environ("CUDA_DEVICE_MAX_CONNECTIONS"):
        validates = torch.distributions.Distribution._validate_args
        try:
            module = COLOSSALAI.load()
        finally:
            torch.distributions.Distribution.set_default_validate_args(validates)
        _log_warnings_only()
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what the import warns of: optional packages, and devices that aren't there."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _log_warnings_only() -> None:
    from colossalai.logging import get_dist_logger

    get_dist_logger().set_level("WARNING")  # of its own; INFO otherwise, on a handler of its own


def accelerator_name(device_type: str) -> str:
    """Return Colossal-AI's name of the accelerator for devices of this type.

    Raises:
        ConfigurationError: it has none.
    """
    if device_type not in ("cpu", "cuda", "npu"):
        raise ConfigurationError(
            f"Colossal-AI has no support for devices of type {device_type!r}: it knows cpu, cuda and npu"
        )
    return device_type


@contextmanager
def session(device_type: str) -> Iterator[None]:
    """Let Colossal-AI work on this type of device inside, and undo at the end what it keeps in the process.

    Its default is the first accelerator that it finds, also where a run is on the CPU beside it. It keeps the ranks of
    the first process group for good, and a plugin writes its stage into the name of its class.
    """
    from colossalai.accelerator import api
    from colossalai.booster.plugin import LowLevelZeroPlugin
    from colossalai.cluster import DistCoordinator
    from colossalai.context.singleton_meta import SingletonMeta

    accelerator, name = api._ACCELERATOR, LowLevelZeroPlugin.__name__
    instances: dict[type, Any] = SingletonMeta._instances
    coordinator = instances.pop(DistCoordinator, None)
    ignored = _ignore_deprecated_names()
    api.set_accelerator(_host_accelerator() if device_type == "cpu" else accelerator_name(device_type))
    try:
        yield
    finally:
        api._ACCELERATOR = accelerator
        LowLevelZeroPlugin.__name__ = name
        _stop_ignoring(ignored)
        instances.pop(DistCoordinator, None)
        if coordinator is not None:
            instances[DistCoordinator] = coordinator


def _ignore_deprecated_names() -> list[Any]:
    """Leave out torch's warnings of old names, which Colossal-AI uses in each step; return the filters."""
    names = (r"torch\.distributed\.\w+_tensor", "broadcast_buffers")
    for name in names:
        warnings.filterwarnings("ignore", f"`{name}` is deprecated", FutureWarning)
    return list(warnings.filters[: len(names)])


def _stop_ignoring(entries: list[Any]) -> None:
    warnings.filters[:] = [entry for entry in warnings.filters if all(entry is not each for each in entries)]  # type: ignore[index]


def _host_accelerator() -> Any:
    """Return Colossal-AI's accelerator for the CPU, with streams: its own raises where ZeRO asks for one."""
    from contextlib import nullcontext

    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    class HostAccelerator(CpuAccelerator):  # type: ignore[misc]
        """The CPU, on which everything is in order without streams."""

        def Stream(self, *args: Any, **kwargs: Any) -> None:
            return None

        def current_stream(self, device: Any = None) -> None:
            return None

        def stream(self, stream_: Any) -> Any:
            return nullcontext()

        def synchronize(self, device: Any = None) -> None:
            return None

    return HostAccelerator()


@contextmanager
def unchecked_device() -> Iterator[None]:
    """Let ZeRO's optimizer be made on a CPU inside: its check, and its loss scaler, allow CUDA and NPU alone.

    It makes the scaler for weights in float16. The Trainer's precision scales the loss, where it is scaled.
    """
    from colossalai.zero.low_level import low_level_optim

    optimizer = low_level_optim.LowLevelZeroOptimizer
    check, scaler = optimizer._sanity_checks, low_level_optim.LowLevelZeroFP16MixedPrecisionMixin
    optimizer._sanity_checks = lambda self: None  # what else it checks, torchhal has
    low_level_optim.LowLevelZeroFP16MixedPrecisionMixin = lambda *args, **options: None
    try:
        yield
    finally:
        optimizer._sanity_checks = check
        low_level_optim.LowLevelZeroFP16MixedPrecisionMixin = scaler


@contextmanager
def unconverted_batchnorms() -> Iterator[None]:
    """Let the data parallel plugin leave batch norms alone inside.

    It makes each a SyncBatchNorm, in the user's module, whether anybody asks for that or not, and these refuse a CPU.
    """
    norm = torch.nn.SyncBatchNorm
    convert = vars(norm)["convert_sync_batchnorm"]
    norm.convert_sync_batchnorm = staticmethod(lambda module, process_group=None: module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        norm.convert_sync_batchnorm = convert  # type: ignore[method-assign]
