"""In a rank of a test's world: the simulated device, in a process group that stays from test to test."""

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from world import rank, size

from torchhal_simulator import load
from torchhal_simulator._device_types import FLAVOURS

_groups = itertools.count()


def joined(flavour):
    """This rank's device, made the current one. The default process group exists and has the device's backend only."""
    device = on_device(flavour)
    if not dist.is_initialized():
        new_world(FLAVOURS[flavour].backend)
    return device


def on_device(flavour):
    """This rank's device, made the current one."""
    module = load(flavour)
    device = torch.device(flavour, rank() if flavour == "sim" else 0)
    module.set_device(device)
    return device


def new_world(backend, timeout=60.0, **options):
    """Make the default process group anew."""
    if dist.is_initialized():
        dist.destroy_process_group()
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    store = dist.PrefixStore(f"simulator/{next(_groups)}", server)
    dist.init_process_group(
        backend, store=store, rank=rank(), world_size=size(), timeout=timedelta(seconds=timeout), **options
    )
