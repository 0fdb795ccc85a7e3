"""The ranks of one communicator, over gloo. It has a connection of its own, as each of Bagua's has with NCCL."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)
"""Bagua gives an operation up after this time."""

DTYPES = (torch.float32, torch.float16, torch.uint8, torch.int64)
"""What Bagua can send."""

_OPS: dict[int, Any] = {0: dist.ReduceOp.SUM, 1: dist.ReduceOp.PRODUCT, 2: dist.ReduceOp.MIN, 3: dist.ReduceOp.MAX}
_AVG = 10
_made: list[Communicator] = []


class Communicator:
    """The connections of a rank to the others.

    Attributes:
        sent: bytes that this rank has given to collectives, as an algorithm's own measure.
    """

    def __init__(self, store: Any, rank: int, nranks: int) -> None:
        self._rank, self._nranks = rank, nranks
        self.sent = 0
        self._group: Any = dist.ProcessGroupGloo(store, rank, nranks, TIMEOUT)
        _made.append(self)

    def rank(self) -> int:
        return self._rank

    def nranks(self) -> int:
        return self._nranks

    def allreduce_inplace(self, tensor: torch.Tensor, op: int) -> None:
        self._take(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[0 if op == _AVG else op]
        self._group.allreduce([tensor], options).wait()
        if op == _AVG:
            tensor /= self._nranks

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._take(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([tensor], options).wait()

    def reduce_inplace(self, tensor: torch.Tensor, root: int, op: int) -> None:
        """Only rank ``root``'s tensor changes."""
        mine = tensor.clone()
        self.allreduce_inplace(mine, op)
        if self._rank == root:
            tensor.copy_(mine)

    def alltoall(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``: (nranks, size), a row for each rank; the rows that the ranks had for this one."""
        self._take(tensor)
        received = torch.empty_like(tensor)
        self._group.alltoall_base(received, tensor, [], []).wait()
        return received

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``: (size,); (nranks, size)."""
        self._take(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self._nranks)]
        self._group.allgather([parts], [tensor]).wait()
        return torch.stack(parts)

    def exchange(self, tensor: torch.Tensor, peers: tuple[int, ...]) -> list[torch.Tensor]:
        """Give ``tensor`` to each of ``peers`` and take theirs. A peer may be this rank, or stand there twice."""
        received = [torch.empty_like(tensor) for _ in peers]
        works = []
        for tag, (peer, buffer) in enumerate(zip(peers, received, strict=True)):
            if peer == self._rank:
                buffer.copy_(tensor)
                continue
            self._take(tensor)
            # what goes to the first of two peers is what comes from the second of theirs
            works.append(self._group.send([tensor], peer, tag))
            works.append(self._group.recv([buffer], peer, (len(peers) - 1 - tag)))
        for work in works:
            work.wait()
        return received

    def _take(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"bagua-stub works on the CPU (got a tensor on {tensor.device})")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"unsupported data type {tensor.dtype}.")
        self.sent += tensor.nbytes


@atexit.register
def _forget() -> None:
    """Gloo's threads must be gone before the interpreter is."""
    for communicator in _made:
        communicator._group = None
    _made.clear()
