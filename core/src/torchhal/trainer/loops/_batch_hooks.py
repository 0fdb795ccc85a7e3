"""Combine the hooks of a batch, of callbacks, module and strategy, into one function before the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchhal._overrides import overrides
from torchhal.pytree import map_tensors
from torchhal.strategies import Strategy
from torchhal.trainer.run_state import RunState

START, END = "on_train_batch_start", "on_train_batch_end"


def train_batch_start(run: RunState) -> Callable[[Any, int], bool] | None:
    """Return ``start(batch, batch_idx)``, which calls the hooks before a training batch; None if there are none.

    It returns whether the module's hook ends the epoch, which leaves the strategy's out.
    """
    of_strategy = _strategy_hook(run.strategy, START)
    if of_strategy is None and not run.hooks.has(START):
        return None
    trainer, module = run.trainer, run.module
    before, after = run.hooks.around_module(START)
    own = run.hooks.of_module(START)

    def start(batch: Any, batch_idx: int) -> bool:
        run.current_hook = START
        for function in before:
            function(trainer, module, batch, batch_idx)
        response = own(batch, batch_idx) if own is not None else None
        for function in after:
            function(trainer, module, batch, batch_idx)
        run.current_hook = "training_step"
        if isinstance(response, int) and response == -1:
            return True
        if of_strategy is not None:
            of_strategy(batch, batch_idx)
        return False

    return start


def train_batch_end(run: RunState) -> Callable[[Any, Any, int], None] | None:
    """Return ``end(output, batch, batch_idx)``, which calls the hooks after a training batch; None if there are none.

    The hooks receive the output without its graph.
    """
    hooks = partial(run.hooks.call, END) if run.hooks.has(END) else None
    call = _in_turn(hooks, _strategy_hook(run.strategy, END))
    if call is None:
        return None
    return lambda output, batch, batch_idx: call(without_graph(output), batch, batch_idx)


def evaluation_batch_hooks(run: RunState, stage: str, word: str) -> tuple[Callable[..., None] | None, ...]:
    """Return the functions that call the hooks before and after a batch of an evaluation, each None without any.

    Args:
        run: whose hooks are called.
        stage: of the evaluation, as the strategy receives it.
        word: the middle of the names of the callbacks' and the module's hooks.

    Returns:
        ``start(batch, batch_idx, dataloader_idx)`` and ``end(output, batch, batch_idx, dataloader_idx)``.
    """
    start = _strategy_hook(run.strategy, "on_evaluation_batch_start")
    end = _strategy_hook(run.strategy, "on_evaluation_batch_end")
    return (
        _in_turn(run.hooks.of_batch(f"on_{word}_batch_start", arguments=3), start and partial(start, stage)),
        _in_turn(run.hooks.of_batch(f"on_{word}_batch_end", arguments=4), end and partial(end, stage)),
    )


def _strategy_hook(strategy: Strategy, name: str) -> Callable[..., None] | None:
    """Return the strategy's hook of that name, or None if no class overrides the empty body."""
    if not overrides(strategy, Strategy, name):
        return None
    hook: Callable[..., None] = getattr(strategy, name)
    return hook


def _in_turn(first: Callable[..., None] | None, second: Callable[..., None] | None) -> Callable[..., None] | None:
    """Return a function that calls both with its arguments, the one that there is, or None."""
    if first is None or second is None:
        return second if first is None else first

    def both(*args: Any) -> None:
        first(*args)
        second(*args)

    return both


def without_graph(output: Any) -> Any:
    """Return what a step returned without its graph, so that it can be kept."""
    if type(output) is torch.Tensor:
        return output.detach()
    return map_tensors(
        output, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
    )
