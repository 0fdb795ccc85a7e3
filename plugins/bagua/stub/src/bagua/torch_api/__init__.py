"""Bagua's PyTorch interface, as far as the stub has it: names and signatures are those of 0.9.2."""

from __future__ import annotations

from bagua.torch_api import algorithms, communication, data_parallel
from bagua.torch_api.communication import ReduceOp, allreduce_inplace, broadcast, init_process_group
from bagua.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size

__all__ = [
    "ReduceOp",
    "algorithms",
    "allreduce_inplace",
    "broadcast",
    "communication",
    "data_parallel",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
]
