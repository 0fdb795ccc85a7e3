"""The lines about a run on the terminal: its hardware, the checkpoint it continues, why it ended and its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal.trainer.run_state import RunState


def announce_start(run: RunState, fn: str) -> None:
    """Before anything is set up: the chosen parts; of an evaluation only if this Trainer hasn't named them yet."""
    parts = describe_parts(run)
    if fn == "fit" or parts not in run.said:
        run.said.add(parts)
        run.announce(f"{_name(run, fn)} with {parts}")


def describe_parts(run: RunState) -> str:
    plan, count = run.plan, run.world_size
    chosen = {
        "accelerator": plan.accelerator.alias,
        "devices": f"[{', '.join(map(str, plan.devices))}]",
        "strategy": plan.strategy.alias,
        "precision": plan.precision.alias,
    }
    processes = "1 process" if count == 1 else f"{count} processes"
    if run.strategy.num_nodes > 1:
        processes += f" on {run.strategy.num_nodes} nodes"
    return ", ".join([*(f"{name}={choice}" for name, choice in chosen.items()), processes])


def announce_checkpoint(run: RunState, fn: str, checkpoint: Mapping[str, Any]) -> None:
    """After it was loaded: the file, and the progress of the run that wrote it."""
    path, loop = run.ckpt_path, run.progress
    if fn == "fit":
        batch = f", batch {loop.batches_done}" if loop.batches_done else ""
        run.announce(f"{_name(run, fn)} continues from {path!r}: epoch {loop.epoch}{batch}, step {loop.global_step}")
    else:
        where = f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
        run.announce(f"{_name(run, fn)} uses the weights of {path!r}: {where}")


def announce_end(run: RunState, why: str) -> None:
    """When a fit is over, with all it keeps on the disk."""
    kept = []
    if run.log_dir is not None:
        kept.append(f"run in {run.log_dir!r}")
    for callback in run.checkpoint_callbacks:
        if callback.best_model_path:
            kept.append(f"{'newest' if callback.monitor is None else 'best'} checkpoint {callback.best_model_path!r}")
            break
    run.announce(f"{_name(run, 'fit')} ended at step {run.global_step}: {'; '.join([why, *kept])}")


def _name(run: RunState, fn: str) -> str:
    return "run" if run.by_hand else fn
