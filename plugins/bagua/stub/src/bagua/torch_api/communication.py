"""Process groups and collectives."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from bagua.torch_api.env import get_autotune_level, get_local_rank, get_node_rank, get_rank, get_world_size
from bagua_stub.communicator import Communicator

_default_pg: BaguaProcessGroup | None = None
_default_store: Any = None
_groups: dict[str, BaguaProcessGroup] = {}


class ReduceOp(IntEnum):
    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


class BaguaProcessGroup:
    def __init__(self, ranks: Sequence[int], stream: Any, group_name: str) -> None:
        self.ranks = list(ranks)
        self.stream = stream
        self.group_name = group_name

    def get_global_communicator(self) -> Communicator:
        return get_communicator(self.group_name, "global")

    def get_inter_node_communicator(self) -> Communicator:
        return get_communicator(self.group_name, "inter")

    def get_intra_node_communicator(self) -> Communicator:
        return get_communicator(self.group_name, "intra")


def is_initialized() -> bool:
    return _default_pg is not None


def init_process_group(store: Any = None) -> None:
    """Connect the ranks that the environment names, once in a process. ``store`` is read as long as it lives."""
    global _default_pg, _default_store
    if _default_pg is not None:
        raise RuntimeError("trying to initialize the default process group twice!")
    if get_autotune_level() > 0:
        raise RuntimeError("bagua-stub has no autotune service: leave BAGUA_AUTOTUNE unset, or set it to 0")
    if store is None:
        store, _, _ = next(rendezvous("env://"))
    _default_store = store
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=store, rank=get_rank(), world_size=get_world_size())
    _default_pg = new_group(stream=None)


def new_group(ranks: Any = None, stream: Any = None) -> BaguaProcessGroup:
    everybody = range(get_world_size())
    group = BaguaProcessGroup(everybody if ranks is None else sorted(ranks), stream, str(len(_groups) + 1))
    _groups[group.group_name] = group
    return group


@cache
def get_communicator(group_name: str, comm_name: str) -> Communicator:
    """Made when it is first asked for, by all its ranks."""
    ranks = _groups[group_name].ranks
    if comm_name != "global":
        places = _places()
        column = 0 if comm_name == "intra" else 1
        mine = (get_node_rank(), places[ranks[0]][1])[column]  # the leaders of the nodes, for those between nodes
        ranks = [rank for rank in ranks if places[rank][column] == mine]
    store = PrefixStore(f"{group_name}_{comm_name}_{','.join(map(str, ranks))}", _default_store)
    if get_rank() not in ranks:
        return _NO_MEMBER  # type: ignore[no-any-return]
    return Communicator(store, ranks.index(get_rank()), len(ranks))


_NO_MEMBER: Any = object()


@cache
def _places() -> list[list[int]]:
    """Each rank's node, and its place there."""
    mine = torch.tensor([get_node_rank(), get_local_rank()])
    places: list[list[int]] = _communicator(None).allgather(mine).tolist()
    return places


def _default_group() -> BaguaProcessGroup:
    if _default_pg is None:
        raise RuntimeError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return _default_pg


def _communicator(comm: Any) -> Communicator:
    return _default_group().get_global_communicator() if comm is None else comm


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Any = None) -> None:
    _communicator(comm).broadcast(tensor, src)


def broadcast_object(obj: object, src: int = 0, comm: Any = None) -> object:
    is_source = get_rank() == src
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if is_source else torch.empty(0)
    size = torch.tensor([data.numel()])
    broadcast(size, src, comm)
    if not is_source:
        data = torch.empty(int(size.item()), dtype=torch.uint8)
    broadcast(data, src, comm)
    return obj if is_source else pickle.loads(data.numpy().tobytes())


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Any = None) -> None:
    _communicator(comm).allreduce_inplace(tensor, int(op))


def barrier(comm: Any = None) -> None:
    _communicator(comm).allreduce_inplace(torch.ones(1), int(ReduceOp.SUM))
