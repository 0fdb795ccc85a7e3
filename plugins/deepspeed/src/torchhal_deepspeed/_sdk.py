"""Check, import, start and end DeepSpeed, and clear what it leaves behind in a process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn import functional

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import VendorPackage, restored_environ

DEEPSPEED: Final = VendorPackage(
    "deepspeed",
    versions=">=0.19.8,<0.20",  # those this package was tested with, as the extra ``vendor`` in pyproject.toml
    plugin="torchhal-deepspeed",
    install="pip install 'torchhal-deepspeed[vendor]'",
    needed_by="strategy 'deepspeed'",
    not_installed="{needed_by} needs DeepSpeed, which is not installed: {install} ({versions})",
    wrong_version="this {plugin} works with {module} {versions} (found {version}): {install} ({versions})",
)

DEVICES: Final = frozenset({"cpu", "cuda", "xpu", "npu", "hpu", "mps", "mlu", "sdaa", "supa"})
"""Device types that DeepSpeed supports."""

_SHARED_MEMORY: Final = "deepspeed_shm_comm"
_UNCOMPILED: Final = ("Unable to JIT load", "Error building extension", "Ninja is required", "'c++'")


def load(device_type: str) -> Any:
    """Import deepspeed for this type of device; return the module.

    DeepSpeed has one device type per process. Its default is the first accelerator that it finds, also where a run is
    on the CPU beside it.

    Raises:
        ConfigurationError: it supports no such device, is in use for another one already, or can't be imported.
    """
    if device_type not in DEVICES:
        raise ConfigurationError(
            f"DeepSpeed has no support for devices of type {device_type!r}: it knows {', '.join(sorted(DEVICES))}"
        )
    with restored_environ("DS_ACCELERATOR"):
        os.environ["DS_ACCELERATOR"] = device_type
        try:  # not DEEPSPEED.load(), which keeps to a failure: on another type of device this may work
            import deepspeed
            from deepspeed.accelerator import real_accelerator

            if real_accelerator.get_accelerator()._name != device_type:
                real_accelerator.ds_accelerator = None
                real_accelerator.get_accelerator()
        except Exception as error:
            raise ConfigurationError(
                f"deepspeed can't be used on {device_type!r} ({type(error).__name__}: {error})"
            ) from error
    return deepspeed


def set_log_level(level: int) -> None:
    """Set the level of DeepSpeed's logger and of its handlers."""
    from deepspeed.utils import logger

    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)


def start(deepspeed: Any, *, broadcast: bool, model: nn.Module, **arguments: Any) -> Any:
    """Return DeepSpeed's engine around ``model``, whose parameters may lie in memory in any order.

    Args:
        deepspeed: the module.
        model: for the engine.
        arguments: more of ``deepspeed.initialize``.
        broadcast: let the engine give every rank rank 0's parameters, which works for dense ones with a dimension only.

    Raises:
        ConfigurationError: it would compile an operator, and can't.
    """
    for parameter in model.parameters():
        if not parameter.data.is_contiguous():
            parameter.data = parameter.data.contiguous()
    engine_class = deepspeed.DeepSpeedEngine
    before = engine_class._broadcast_model
    if not broadcast:
        engine_class._broadcast_model = lambda engine: None
    try:
        engine, *_ = deepspeed.initialize(model=model, dist_init_required=False, **arguments)
    except Exception as error:
        _destroy_half_started(error, engine_class)
        said = [str(error), str(error.__cause__), str(error.__context__)]
        if not any(mark in text for mark in _UNCOMPILED for text in said):
            raise
        raise ConfigurationError(
            f"DeepSpeed has to compile an operator and can't, as it takes ninja and a C++ compiler ({error}). Without "
            "them use an optimizer of torch's: 'params': {'torch_adam': True} in the configuration's 'optimizer', or "
            "one that configure_optimizers returns; and offload to 'cpu' rather than to 'nvme'"
        ) from error
    finally:
        engine_class._broadcast_model = before
    return engine


def forget(engine: Any) -> None:
    """End an engine, and what DeepSpeed's modules would never free: at stage 3 its model, optimizer and buffers."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    _destroy(engine)
    ours = set(map(id, engine.module.modules()))
    called = parameter_offload.FWD_MODULE_STACK
    called[:] = [module for module in called if id(module) not in ours]
    # a method with a cache, in a decorator that hides it
    method = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in method.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def _destroy(engine: Any) -> None:
    """Destroy an engine once: its finalizer would again, and take from the parameters what another has put there.

    It runs whenever Python collects the engine. In the next run of the module, checkpoints were without values then.
    """
    try:
        engine.destroy()
    finally:
        engine.destroy = lambda: None


def _destroy_half_started(error: Exception, engine_class: type[Any]) -> None:
    """Destroy the engine whose start raised ``error``, which nothing but the frames of its traceback holds."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(engine := frame.f_locals.get("self"), engine_class):
            with suppress(Exception):  # of what it doesn't have yet
                _destroy(engine)


@contextmanager
def ranks_in_environment(rank: int, local_rank: int, world_size: int) -> Iterator[None]:
    """Set the variables that DeepSpeed reads the ranks from, where the launcher has not set them."""
    wanted = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    added = {name: str(value) for name, value in wanted.items() if name not in os.environ}
    with restored_environ(*added):
        os.environ.update(added)
        yield


def _end_groups(groups: Any) -> None:
    """Destroy the process groups that DeepSpeed keeps in its module ``groups``; the next run has others.

    The end of the default group would, but that stays where it is the user's.
    """
    kept = [value for name, value in vars(groups).items() if name.endswith("_GROUP") and value is not None]
    groups._release_process_group_references()
    made = [group for value in kept for group in (value.values() if isinstance(value, dict) else (value,))]
    for group in dict.fromkeys(made):
        if dist.is_initialized() and group is not dist.group.WORLD:
            with suppress(ValueError):  # it was destroyed before
                dist.destroy_process_group(group)


@contextmanager
def communication(deepspeed: Any) -> Iterator[None]:
    """Start DeepSpeed's communication over the process group that exists, without the shared-memory operator.

    It would compile that operator (half a minute, a compiler and ninja) whenever communication starts on a CPU, and
    use it only for inference with tensor parallelism. What a strategy here sends goes through torch in any case.
    """
    from deepspeed.comm import comm

    before, known = comm.cdb, dict(deepspeed.ops.__compatible_ops__)
    linear = functional.linear
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    try:
        if before is None:
            comm.init_distributed(auto_mpi_discovery=False, verbose=False)
        yield
    finally:
        deepspeed.ops.__compatible_ops__.update(known)
        functional.linear = linear  # zero.Init puts one of its own there and leaves it
        if before is None:
            comm.cdb = None
            _end_groups(deepspeed.utils.groups)
