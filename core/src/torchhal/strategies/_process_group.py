"""Check and adjust torch's default process group where its own set-up is insufficient."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from torchhal.errors import ConfigurationError


def set_default_backend(group: Any, backend: str, device_type: str) -> None:
    """Make the device's backend the default one of a process group with several.

    torch looks up hooks in the default backend, when the group ends at the latest; by itself it detects few backends
    other than its own as the default, and warns on every rank that it has found none.

    Args:
        group: a process group.
        backend: torch's name of it, e.g. ``"cpu:gloo,sim:gloo"``; for a name of one backend nothing is done.
        device_type: torch's device type.
    """
    name = ""
    if ":" in backend:  # with one backend torch detects it
        name = dict(part.split(":", 1) for part in backend.split(",")).get(device_type, "")
    kind = getattr(dist.Backend, "backend_type_map", {}).get(name.lower())
    if kind is not None and hasattr(group, "_set_default_backend"):
        group._set_default_backend(kind)


def check_supports_device(group: Any, device_type: str, backend: str) -> None:
    """Raise an error for a process group that can't carry this device's tensors: its first collective might hang.

    Args:
        group: the process group that exists.
        device_type: torch's device type.
        backend: the one that would be right, for the message.

    Raises:
        ConfigurationError: it has no backend for that device type.
    """
    try:
        group._get_backend(torch.device(device_type))
    except RuntimeError as error:
        raise ConfigurationError(
            f"a process group exists already, but its backend {dist.get_backend()!r} doesn't carry tensors of "
            f"device type {device_type!r}: make it with backend={backend!r}, or leave it to the strategy"
        ) from error


def import_default_arguments() -> None:
    """Import torch's module whose functions take the default group as of its import for their default arguments.

    torch imports it with the first DistributedDataParallel. The group that exists by then would never be freed: its
    connections stay open when it is destroyed, and ranks that wait for this one wait until its process has ended.
    """
    importlib.import_module("torch.distributed.nn.functional")


def reset_group_count() -> None:
    """Reset torch's count of process groups, which is a part of the default group's keys in the store.

    torch counts the groups of a process and begins again when a default group ends. One that failed in its set-up has
    been counted and never ends: its rank would then wait under another number than the others.
    """
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    if hasattr(world, "group_count"):
        world.group_count = 0
