"""The lines about a run on the terminal: what it runs on, what it continues, why it ended and where it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchhal.trainer.trainer import Trainer


def announce_start(trainer: Trainer, fn: str) -> None:
    """Before anything is set up: the chosen parts; of an evaluation only if this Trainer hasn't named them yet."""
    parts = describe_parts(trainer)
    if fn == "fit" or parts not in trainer.said:
        trainer.said.add(parts)
        trainer.announce(f"{fn} with {parts}")


def describe_parts(trainer: Trainer) -> str:
    plan, count = trainer.plan, trainer.world_size
    chosen = {
        "accelerator": plan.accelerator.alias,
        "devices": f"[{', '.join(map(str, plan.devices))}]",
        "strategy": plan.strategy.alias,
        "precision": plan.precision.alias,
    }
    processes = "1 process" if count == 1 else f"{count} processes"
    if trainer.strategy.num_nodes > 1:
        processes += f" on {trainer.strategy.num_nodes} nodes"
    return ", ".join([*(f"{name}={choice}" for name, choice in chosen.items()), processes])


def announce_checkpoint(trainer: Trainer, fn: str, checkpoint: Mapping[str, Any]) -> None:
    """After it was loaded: the file, and how far the run that wrote it had come."""
    path, loop = trainer.ckpt_path, trainer.fit_loop
    if fn == "fit":
        batch = f", batch {loop.batches_done}" if loop.batches_done else ""
        trainer.announce(f"fit continues from {path!r}: epoch {loop.epoch}{batch}, step {loop.global_step}")
    else:
        where = f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
        trainer.announce(f"{fn} uses the weights of {path!r}: {where}")


def announce_end(trainer: Trainer) -> None:
    """When a fit is over, with all it keeps on the disk."""
    kept = []
    if trainer.log_dir is not None:
        kept.append(f"run in {trainer.log_dir!r}")
    for callback in trainer.checkpoint_callbacks:
        if callback.best_model_path:
            kept.append(f"{'newest' if callback.monitor is None else 'best'} checkpoint {callback.best_model_path!r}")
            break
    why = trainer.fit_loop.why_done()
    trainer.announce(f"fit ended at step {trainer.global_step}: {'; '.join([why, *kept])}")
