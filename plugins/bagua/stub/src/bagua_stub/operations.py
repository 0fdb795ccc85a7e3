"""What Bagua's backend does with a bucket: each operation combines one flat tensor with those of other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from bagua_stub.communicator import Communicator
from bagua_stub.quantization import compress, decompress

_SUM, _MIN, _AVG = 0, 2, 10

stream = threading.RLock()
"""What torch does to the weights of a model, one thing at a time, as on a CUDA stream."""


class Ranks:
    """All ranks at once or, hierarchically, those of a node first and one of each node then."""

    def __init__(self, group: Any, *, hierarchical: bool) -> None:
        self.nodes: Communicator | None
        if hierarchical:
            self.node: Communicator | None = group.get_intra_node_communicator()
            inter = group.get_inter_node_communicator()
            assert self.node is not None
            self.nodes = inter if self.node.rank() == 0 else None
        else:
            self.node, self.nodes = None, group.get_global_communicator()

    def run(
        self,
        flat: torch.Tensor,
        combine: Callable[[Communicator], None],
        *,
        average: bool,
        before: bool = True,
        after: bool = True,
    ) -> None:
        if self.node is not None and before:
            self.node.reduce_inplace(flat, 0, _AVG if average else _SUM)
        if self.nodes is not None:
            combine(self.nodes)
        if self.node is not None and after:
            self.node.broadcast(flat, 0)


class Centralized:
    """Mean or sum of all ranks' tensors."""

    def __init__(self, group: Any, *, hierarchical: bool, average: bool) -> None:
        self.ranks, self.average = Ranks(group, hierarchical=hierarchical), average

    def __call__(self, flat: torch.Tensor) -> None:
        op = _AVG if self.average else _SUM
        self.ranks.run(flat, lambda ranks: ranks.allreduce_inplace(flat, op), average=self.average)


class CompressedCentralized:
    """The same in bytes: each rank combines one chunk, of which it gets a compressed version from every other."""

    def __init__(self, group: Any, *, hierarchical: bool, average: bool) -> None:
        self.ranks, self.average = Ranks(group, hierarchical=hierarchical), average

    def __call__(self, flat: torch.Tensor) -> None:
        self.ranks.run(flat, lambda ranks: self._combine(ranks, flat), average=self.average)

    def _combine(self, ranks: Communicator, flat: torch.Tensor) -> None:
        bounds, levels = compress(flat.view(ranks.nranks(), -1))
        parts = decompress(ranks.alltoall(bounds), ranks.alltoall(levels))
        chunk = parts.mean(0) if self.average else parts.sum(0)
        bounds, levels = compress(chunk)
        flat.copy_(decompress(ranks.allgather(bounds), ranks.allgather(levels)).flatten())


class Decentralized:
    """The mean of weights with all ranks, or with another peer each time; written back when it is asked for."""

    def __init__(self, group: Any, *, hierarchical: bool, peer_selection_mode: str) -> None:
        self.ranks, self.mode = Ranks(group, hierarchical=hierarchical), peer_selection_mode
        self.step = 0
        self.averaged: torch.Tensor | None = None

    def __call__(self, flat: torch.Tensor) -> None:
        mine = flat.clone()
        self.ranks.run(mine, lambda ranks: self._combine(ranks, mine), average=True, after=False)
        self.averaged = mine
        self.step += 1

    def _combine(self, ranks: Communicator, mine: torch.Tensor) -> None:
        if self.mode == "all":
            ranks.allreduce_inplace(mine, _AVG)
            return
        size, rank = ranks.nranks(), ranks.rank()
        assert size % 2 == 0, f"shift_one needs an even number of ranks (got {size})"
        half = size // 2
        peer = (self.step + rank) % half + half if rank < half else (rank - half - self.step) % half
        (theirs,) = ranks.exchange(mine, (peer,))
        mine.add_(theirs).div_(2)

    def copy_back(self, flat: torch.Tensor) -> None:
        averaged = self.averaged
        assert averaged is not None
        self.ranks.run(averaged, lambda ranks: None, average=True, before=False)
        flat.copy_(averaged)


class LowPrecisionDecentralized:
    """Each rank keeps its own and its two neighbours' weights as all three know them; what changed travels in bytes."""

    def __init__(self, group: Any, flat: torch.Tensor, *, hierarchical: bool) -> None:
        self.ranks = Ranks(group, hierarchical=hierarchical)
        self.known, self.left, self.right = flat.clone(), flat.clone(), flat.clone()

    def __call__(self, flat: torch.Tensor) -> None:
        self.ranks.run(flat, lambda ranks: self._combine(ranks, flat), average=True)

    def _combine(self, ranks: Communicator, flat: torch.Tensor) -> None:
        size, rank = ranks.nranks(), ranks.rank()
        change = flat + self.left / 3 + self.right / 3 - self.known * 5 / 3
        bounds, levels = compress(change)
        peers = (rank - 1) % size, (rank + 1) % size
        for place, least_greatest, their_levels in zip(
            (self.left, self.right), ranks.exchange(bounds, peers), ranks.exchange(levels, peers), strict=True
        ):
            place.add_(decompress(least_greatest, their_levels))
        self.known.add_(decompress(bounds, levels))
        flat.copy_(self.known)


class AsynchronousAverage:
    """Averages weights while they are trained: what comes back from the others is added as a difference."""

    def __init__(self, group: Any) -> None:
        self.ranks: Communicator = group.get_global_communicator()
        self.weights = threading.Lock()
        self.aborted, self.running = False, True
        self.rounds = 0

    def __call__(self, flat: torch.Tensor) -> None:
        aborted = torch.tensor([self.aborted], dtype=torch.uint8)
        self.ranks.allreduce_inplace(aborted, _MIN)
        if aborted.item():  # everybody wants to stop
            self.running = False
            return
        with stream:
            before = flat.clone()
        total = before.clone()
        self.ranks.allreduce_inplace(total, _SUM)
        with self.weights, stream:
            flat.add_(total / self.ranks.nranks() - before)
        self.rounds += 1

    def lock_weight(self) -> None:
        self.weights.acquire()

    def unlock_weight(self) -> None:
        self.weights.release()

    def abort(self) -> None:
        self.aborted = True

    def reset(self) -> None:
        self.aborted, self.running = False, True

    def get_status(self) -> bool:
        return self.running
