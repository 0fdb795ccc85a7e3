"""Load a flavour: compile it if need be, register its device, its module and its process-group backend with torch."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from importlib import metadata

import torch
from torch.utils import backend_registration

from torchhal_simulator import _config as config
from torchhal_simulator import _distributed as distributed
from torchhal_simulator._build import shared_library
from torchhal_simulator._device_module import DeviceModule
from torchhal_simulator._device_types import Flavour, add_loaded, flavour_named
from torchhal_simulator._seeding import seed_with_torch

_log = logging.getLogger("torchhal_simulator")

_loaded: dict[str, DeviceModule] = {}
_unusable: dict[str, str] = {}  # registered all the same: why
_lock = threading.Lock()


def load(flavour: str = "sim") -> DeviceModule:
    """Register the simulated device with torch, once per process, and return its device module (``torch.sim``).

    The first load on a machine compiles the C++ sources, which takes about half a minute.

    Raises:
        ValueError: no such flavour, or an environment variable of :mod:`~torchhal_simulator._config` is nonsense.
        BuildError: (an ImportError) it can't be compiled here: another torch, no compiler, no place for the result.
        RuntimeError: the device belongs to somebody else in this process or environment, or torch has been asked for
            its accelerator before ``"hpu"`` was loaded.
    """
    chosen = flavour_named(flavour)
    with _lock:
        if flavour in _unusable:
            raise RuntimeError(_unusable[flavour])
        if flavour not in _loaded:
            config.from_environment()  # nonsense is said before half a minute of compiling
            _refuse_company(chosen)
            # one after the other: two compilers need 3 GB, and Ctrl-C ends one that this thread waits for
            device_library = shared_library("device.cpp", defines=chosen.defines)
            backend_library = shared_library("backend.cpp", defines=chosen.defines, python=True)
            torch.ops.load_library(str(device_library))  # type: ignore[no-untyped-call]
            module = DeviceModule(chosen, lambda: config.current().devices)
            _register(chosen, module)
            distributed.register(chosen, backend_library)
            config.apply(chosen)
            # as torch.manual_seed would have done, had it known the device; CUDA has such seeds queued
            module.manual_seed_all(torch.initial_seed())
            _check_accelerator(chosen)
            if not _loaded:
                atexit.register(_stop_autograd_threads, chosen, os.getpid())
            _loaded[flavour] = module
            add_loaded(chosen)
    return _loaded[flavour]


def _stop_autograd_threads(flavour: Flavour, process: int) -> None:
    """End autograd's threads with the interpreter, which they must not outlive.

    A forked child has none of them.
    """
    if os.getpid() == process:
        flavour.ops.stop_autograd_threads()


def _register(flavour: Flavour, module: DeviceModule) -> None:
    if flavour.device_type == "sim":
        backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module(flavour.device_type, module)  # type: ignore[no-untyped-call]
    if flavour.device_type == "sim":
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    else:
        seed_with_torch(module)


def _refuse_company(flavour: Flavour) -> None:
    """Refuse a device whose hardware or other backend is there: a simulator never stands in for it."""
    if flavour.device_type == "sim":
        name = torch._C._get_privateuse1_backend_name()
        # its name may be "sim" by somebody else's choice, or not be chosen yet
        if name not in ("privateuseone", "sim") or torch._C._dispatch_has_kernel_for_dispatch_key(
            "aten::empty.memory_format", "PrivateUse1"
        ):
            raise RuntimeError(
                "the simulated accelerator needs torch's PrivateUse1 device, which another library has taken in this "
                f"process (it is called {name!r}): use the one or the other"
            )
        return
    for distribution in ("habana-torch-plugin", "habana-torch-dataloader"):
        try:
            metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            continue
        raise RuntimeError(
            f"{distribution} is installed: the simulated HPU would stand in for the real one. Uninstall "
            "torchhal-simulator, or work in an environment without the vendor's packages"
        )


def _check_accelerator(flavour: Flavour) -> None:
    """Warn, or refuse the device later, if torch's one accelerator is another: only its tensors have a backward."""
    others = [name for name in _loaded if name != flavour.device_type]
    if others:
        _log.warning(
            "both simulated flavours are loaded, and torch has one accelerator, which is 'sim' then: tensors on 'hpu' "
            "compute, but have no backward. Train on 'hpu' in a process that loads it alone"
        )
    elif config.current().devices:  # without hardware no device is the accelerator
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != flavour.device_type:
            _unusable[flavour.device_type] = (
                "torch was asked for its accelerator (torch.accelerator, or something that uses it) before the "
                f"simulated {flavour.device_type!r} was loaded, and keeps to its answer, {accelerator}: backward can't "
                f"work. Call torchhal_simulator.load({flavour.device_type!r}) before the first question, in a new "
                "process"
            )
            raise RuntimeError(_unusable[flavour.device_type])
