"""Step learning-rate schedulers by epochs or optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchhal.errors import ConfigurationError
from torchhal.trainer.run_state import RunState


def step_schedulers(
    run: RunState, interval: str, count: int, lr_scheduler_step: Callable[[Any, Any], Any] | None
) -> None:
    """Step the schedulers of this interval whose frequency divides ``count``."""
    for config in run.strategy.lr_scheduler_configs:
        if config.interval != interval or count % config.frequency:
            continue
        metric = None
        if config.monitor is not None and config.reduce_on_plateau:
            if interval == "step":
                run.results.share_steps()
            metric = run.results.callback_metrics.get(config.monitor)
            if run.world_size > 1:  # schedulers that monitor per-rank values would diverge
                metric = run.strategy.broadcast(metric)
            if metric is None:
                if config.strict:
                    raise ConfigurationError(
                        f"the scheduler {type(config.scheduler).__name__} monitors {config.monitor!r}, which was not "
                        f"logged; there are {', '.join(map(repr, run.results.callback_metrics)) or 'no metrics'}"
                    )
                continue
        if lr_scheduler_step is not None:
            lr_scheduler_step(config.scheduler, metric)
        elif metric is not None:
            config.scheduler.step(metric)
        else:
            config.scheduler.step()
