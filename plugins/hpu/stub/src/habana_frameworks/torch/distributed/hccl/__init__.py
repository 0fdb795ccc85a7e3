"""The backend ``hccl``, which the simulator brings, and which of the machine's modules a process is to take."""

from __future__ import annotations

import os

from habana_frameworks.torch.hpu._utils import HABANA_VISIBLE_MODULES_VAR, HLS_MODULE_ID_VAR

__all__ = ["initialize_distributed_hpu"]

_RANKS = {
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "RANK": "OMPI_COMM_WORLD_RANK",
}


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """World size, rank and local rank, from the arguments or the environment, which is given what it lacks.

    As the vendor's: called at import, and whoever imports it without RANK, WORLD_SIZE and LOCAL_RANK has MASTER_ADDR
    and MASTER_PORT set, to localhost and 12345.
    """
    environ = os.environ
    if world_size is not None and rank is not None and local_rank is not None:
        environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(local_rank))
    elif not all(name in environ for name in _RANKS):
        if all(name in environ for name in _RANKS.values()):
            environ.update({name: environ[source] for name, source in _RANKS.items()})
        environ.setdefault("MASTER_ADDR", "localhost")
        environ.setdefault("MASTER_PORT", "12345")
    size, own, local = (int(environ.get(name, default)) for name, default in
                        (("WORLD_SIZE", 1), ("RANK", -1), ("LOCAL_RANK", -1)))  # fmt: skip
    if HLS_MODULE_ID_VAR not in environ and local != -1 and size != 1:
        modules = environ[HABANA_VISIBLE_MODULES_VAR].split(",") if HABANA_VISIBLE_MODULES_VAR in environ else None
        assert modules is None or local < len(modules), (
            f"There is not enough devices available for training. Please verify if {HABANA_VISIBLE_MODULES_VAR} is set "
            "correctly."
        )
        environ[HLS_MODULE_ID_VAR] = str(local) if modules is None else modules[local]
    if own != -1:
        environ["ID"] = str(own)
    return size, own, local


initialize_distributed_hpu()
