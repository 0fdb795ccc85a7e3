"""Send a loop's metrics to the run's loggers, as means over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

from torchhal import _arguments as arguments
from torchhal.errors import ModelError
from torchhal.trainer.run_state import RunState


def log_metrics(
    state: RunState,
    metrics: Mapping[str, Any],
    *,
    step: int | None,
    always: bool,
    gather: Callable[[Any], list[Any]] | None = None,
) -> None:
    """Send ``metrics`` to the loggers, if it is their turn. Every rank must call.

    Args:
        state: of the run.
        metrics: numbers and tensors of one element, by name.
        step: None for the run's optimizer step.
        always: False for values of a batch, of which every ``log_every_n_steps``-th is sent.
        gather: returns a value of the ranks that take part; None: all do.

    Raises:
        ModelError: a value is no number.
    """
    if not isinstance(metrics, Mapping):
        raise ModelError(f"log takes a dict of numbers by name (got {metrics!r}): run.log({{'loss': loss}})")
    arguments.check_optional_count("step", step, minimum=0)
    for name, value in metrics.items():
        numeric = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        if not isinstance(name, str) or not (numeric or isinstance(value, Real)):
            raise ModelError(f"log takes names and numbers, or tensors of one element (got {name!r}: {value!r})")
    every = state.log_every_n_steps
    if not always and (not every or state.progress.total_batches % every):
        return
    if not state.loggers and state.world_size == 1:
        _keep(state, {name: float(value) for name, value in metrics.items()})
        return
    mine = {name: float(value) for name, value in metrics.items()} if state.strategy.is_data_leader else {}
    if gather is None:
        gather = state.strategy.all_gather_object if state.world_size > 1 else lambda value: [value]
    everybody = gather(mine)
    names = dict.fromkeys(name for each in everybody for name in each)
    means = {}
    for name in names:
        values = [each[name] for each in everybody if name in each]
        means[name] = sum(values) / len(values)
    _keep(state, means)
    if state.is_global_zero and state.loggers and means:
        numbers = {**means, "epoch": float(state.current_epoch)}
        state.call_loggers("log_metrics", numbers, state.global_step if step is None else step)


def _keep(state: RunState, means: Mapping[str, float]) -> None:
    """Let the names of checkpoints and other readers see the newest values."""
    state.results.callback_metrics.update({name: torch.tensor(value) for name, value in means.items()})
