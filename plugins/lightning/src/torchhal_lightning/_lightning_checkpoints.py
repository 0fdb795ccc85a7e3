"""Read a checkpoint that Lightning's Trainer has written as one of torchhal's."""

from __future__ import annotations

from typing import Any

from torchhal import rng
from torchhal.errors import CheckpointCorruptError
from torchhal.trainer.adapters import RunState
from torchhal_lightning import _trees as trees

VERSION = "pytorch-lightning_version"
FORMAT = 1
"""torchhal's, of what :func:`from_lightning` returns."""


def is_lightnings(checkpoint: dict[str, Any]) -> bool:
    """Whether Lightning's Trainer has written ``checkpoint``; torchhal's have its version too."""
    return VERSION in checkpoint and "torchhal_format" not in checkpoint


def from_lightning(checkpoint: dict[str, Any], run: RunState, path: str) -> dict[str, Any]:
    """Return the same state in torchhal's format: weights, optimizers, schedulers, callbacks, scaler and counters.

    Lightning saves neither the random-number generators nor the position in a shuffled epoch: a checkpoint from inside
    of an epoch goes on at its next batch in the order of now. What the epoch has logged begins anew.

    Args:
        checkpoint: as loaded; of any version that Lightning itself can read.
        run: that continues.
        path: of the file, for messages.

    Raises:
        CheckpointCorruptError: a counter of Lightning's loops is missing, or the version is none of Lightning's.
    """
    tree: Any = trees.first(trees.root_of(run.module))
    try:
        checkpoint, _ = tree.utilities.migration.migrate_checkpoint(checkpoint)
    except Exception as error:
        raise _damaged(path, f"Lightning can't read its version ({type(error).__name__}: {error})") from error
    if "loops" not in checkpoint or "optimizer_states" not in checkpoint:
        weights_only = {name: value for name, value in checkpoint.items() if name != "loops"}
        return {**weights_only, "torchhal_format": FORMAT}
    try:
        counters = _counters(checkpoint["loops"]["fit_loop"], checkpoint["global_step"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its counters lack {error}") from error
    counters["accumulate"] = run.accumulate_grad_batches
    inside = counters["batches_done"] and not counters["epoch_done"]
    run.trainer.warn_once(
        f"{path!r}, of Lightning {checkpoint[VERSION]}, is continued with its weights, optimizers, schedulers, "
        f"callbacks and counters, and with random numbers of now{', the epoch in the order of now' if inside else ''}"
    )
    strategy = run.strategy
    kwargs = strategy.distributed_sampler_kwargs
    state = rng.collect(strategy.accelerator, strategy.root_device)
    shares = strategy.all_gather_object([1, 0] if kwargs is None else [kwargs["num_replicas"], kwargs["rank"]])
    return {
        **checkpoint,
        "torchhal_format": FORMAT,
        "epoch": counters["epoch"],
        "global_step": counters["global_step"],
        "lr_schedulers": checkpoint.get("lr_schedulers", []),
        "callbacks": checkpoint.get("callbacks", {}),
        "precision": checkpoint.get("MixedPrecision", {}),
        "loops": {
            "fit": counters,
            "results": {"callback_metrics": {}, "progress_bar_metrics": {}, "ranks": [{} for _ in shares]},
        },
        "ranks": [{"rng": state, "data": None, "share": share, "batch_size": None} for share in shares],
    }


def _damaged(path: str, why: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{path!r}, a checkpoint of Lightning, can't be continued from: {why}. Continue from another one, or load its "
        "weights alone (load_from_checkpoint) and fit without ckpt_path"
    )


def _counters(fit: dict[str, Any], global_step: int) -> dict[str, Any]:
    """Return torchhal's counters from the progress of Lightning's fit loop."""
    epochs, batches = fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]
    between = epochs["ready"] == epochs["completed"]  # two epochs
    ended = bool(batches.get("is_last_batch")) and not between
    validated = fit.get("epoch_loop.val_loop.batch_progress", {}).get("current", {}).get("ready", 0) > 0
    total = batches["total"]["processed"]
    return {
        "epoch": epochs["completed"],
        "batches_done": 0 if between else batches["current"]["processed"],
        "global_step": global_step,
        "total_batches": total,
        "scheduler_steps": global_step,
        "validated_at": total if ended and validated else -1,
        "epoch_done": ended,
        "elapsed": 0.0,
    }
