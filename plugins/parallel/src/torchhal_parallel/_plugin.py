"""The manifest: what this distribution provides, without importing torch."""

from __future__ import annotations

from typing import Any

from torchhal.plugin import Candidate, Component, hookimpl


@hookimpl
def torchhal_checkpoint_ios() -> list[Component]:
    asynchronous = "torchhal_parallel.checkpoint.asynchronous:AsyncCheckpointIO"
    return [
        Component(
            "dcp", "torchhal_parallel.checkpoint.dcp:DCPCheckpointIO", "A folder, to which every rank writes its part"
        ),
        Component("async", asynchronous, "torch's file, written while training goes on", {"inner": "torch"}),
        Component("dcp_async", asynchronous, "dcp's folder, written while training goes on", {"inner": "dcp"}),
    ]


_RECOMPUTE = {"activation_checkpointing": "blocks"}
_OFFLOAD = {"cpu_offload": True}
_SHARDS = {"data": 1, "shard": None}
_SIZES = (2, 4, 8)
"""Ranks that share the layers of a model, or its stages, where others have replicas or shards of it."""


def _among(size: int) -> dict[str, Any]:
    """Return what tensor parallelism over ``size`` ranks needs: they talk in every layer."""
    return {"multiple_of": size, "within_node": True}


@hookimpl
def torchhal_strategies() -> list[Component]:
    zero1 = "torchhal_parallel.zero1:ZeRO1Strategy"
    fsdp = "torchhal_parallel.fsdp:FSDPStrategy"
    hybrid = "torchhal_parallel.hybrid:HybridStrategy"
    data_parallel = "torchhal_parallel.data_parallel"
    stage2 = {"reshard_after_forward": False}
    return [
        Component("dp", f"{data_parallel}:DataParallelStrategy", "one process, each batch divided among its devices"),
        Component("ddp2", f"{data_parallel}:DDP2Strategy", "dp inside each node, ddp between the nodes"),
        Component(
            "zero1",
            zero1,
            "ddp with the optimizer's state divided among the ranks",
            aliases=("ddp_sharded",),
            candidates=(Candidate(20),),
        ),
        Component(
            "zero2",
            fsdp,
            "gradients and optimizer state sharded, parameters while they aren't used",
            stage2,
            candidates=(Candidate(30),),
        ),
        Component(
            "ddp_sharded_spawn",
            fsdp,
            "zero2 in processes started by spawn",
            {**stage2, "start_method": "spawn"},
        ),
        Component(
            "zero3",
            fsdp,
            "parameters, gradients and optimizer state sharded",
            aliases=("fsdp", "ddp_fully_sharded"),
            candidates=(
                Candidate(40),
                Candidate(46, _RECOMPUTE, recomputes=True),
                Candidate(50, _OFFLOAD),
                Candidate(52, {**_OFFLOAD, **_RECOMPUTE}, recomputes=True),
            ),
        ),
        Component(
            "tensor_parallel",
            hybrid,
            "layers shared by the ranks, by a plan of column- and row-wise layers",
            {"tensor": None},
        ),
        Component(
            "pipeline",
            hybrid,
            "stages of the model over the ranks",
            {"pipeline": None},
            candidates=(Candidate(74, splits_batches=True, multiple_of=2),),
        ),
        Component(
            "hybrid",
            hybrid,
            "data x shard x pipeline x tensor on one device mesh",
            {"data": None},
            candidates=(
                Candidate(44, _RECOMPUTE, recomputes=True),  # replicas, as of ddp
                *(Candidate(60 + i, {"tensor": n}, **_among(n)) for i, n in enumerate(_SIZES)),
                *(
                    Candidate(64 + i, {"tensor": n, **_RECOMPUTE}, recomputes=True, **_among(n))
                    for i, n in enumerate(_SIZES)
                ),
                *(Candidate(70 + i, {"pipeline": n}, splits_batches=True, multiple_of=n) for i, n in enumerate(_SIZES)),
                *(Candidate(80 + i, {**_SHARDS, "tensor": n}, **_among(n)) for i, n in enumerate(_SIZES)),
                *(
                    Candidate(84 + i, {**_SHARDS, "tensor": n, **_RECOMPUTE}, recomputes=True, **_among(n))
                    for i, n in enumerate(_SIZES)
                ),
            ),
        ),
    ]
