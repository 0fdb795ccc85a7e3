"""Collect and load what a joining replica group takes over: the model, its optimizer, and how far they are.

It is plain data and tensors on the CPU, which nothing changes while others read it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from torchhal.errors import CheckpointMismatchError
from torchhal.strategies import Strategy


def collect(strategy: Strategy) -> dict[str, Any]:
    """Return the state between two steps."""
    (optimizer,) = strategy.optimizers
    trainer = strategy.trainer
    state = {
        "state_dict": dict(strategy.module_state_dict()),
        "optimizer": strategy.optimizer_state(optimizer),
        "schedulers": [strategy.scheduler_state(config) for config in strategy.lr_scheduler_configs],
        "precision": strategy.precision.state_dict(),
        "fit": None if trainer is None else trainer.fit_loop.state_dict(),
    }
    taken: dict[str, Any] = copied(state)
    return taken


def load(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Continue from :func:`collect`'s value of another group.

    Raises:
        CheckpointMismatchError: the other group has another model, optimizer or schedulers.
    """
    try:
        strategy.load_module_state_dict(state["state_dict"])
        strategy.load_optimizer_state(strategy.optimizers[0], state["optimizer"])
        schedulers = strategy.lr_scheduler_configs
        if len(state["schedulers"]) != len(schedulers):
            raise CheckpointMismatchError(
                f"they have {len(state['schedulers'])} scheduler(s), and this one has {len(schedulers)}"
            )
        for config, own in zip(schedulers, state["schedulers"], strict=True):
            strategy.load_scheduler_state(config, own)
        strategy.precision.load_state_dict(state["precision"])
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"this replica group trains something else than the others: {error}") from error
    trainer = strategy.trainer
    if trainer is not None and state["fit"] is not None:
        fit = trainer.fit_loop
        fit.load_state_dict({**state["fit"], "elapsed": fit.elapsed_before})


def copied(value: Any) -> Any:
    """Return a nest of dicts, lists and tuples with each tensor in CPU memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):  # others, such as the Counter of a MultiStepLR, hold no tensors
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value
