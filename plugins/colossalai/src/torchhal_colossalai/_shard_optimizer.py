"""Show the user's optimizer to Colossal-AI with this rank's shards for parameters, and to everybody else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.strategies.sharded_optimizers import with_parameters


class _Group(MutableMapping[str, Any]):
    """A parameter group of the user's optimizer with other parameters."""

    def __init__(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        self._group = group
        self._parameters = parameters

    def __getitem__(self, name: str) -> Any:
        return self._parameters if name == "params" else self._group[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            self._parameters = value
        else:
            self._group[name] = value

    def __delitem__(self, name: str) -> None:
        del self._group[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


class ShardOptimizer:
    """The user's optimizer as Colossal-AI's ZeRO has it: it writes shards into the parameter groups.

    The user's groups keep the parameters that they have, for schedulers and callbacks, and its state is by these, with
    this rank's part in it; only inside of :meth:`on_shards` does the optimizer itself have the shards.

    Args:
        optimizer: the user's.
        parameters: of each group, those that are divided.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[list[torch.Tensor]]) -> None:
        self.optimizer = optimizer
        self._groups = [_Group(group, own) for group, own in zip(optimizer.param_groups, parameters, strict=True)]
        # Colossal-AI takes the dtype of the first group's first parameter
        self.param_groups = [group for group in self._groups if group["params"]]
        self.defaults = optimizer.defaults
        self.shard_of: dict[torch.Tensor, torch.Tensor] = {}
        """This rank's part of each parameter that is divided."""
        self.run_step: Callable[[], None] = optimizer.step
        """Steps the user's optimizer, as the strategy and the precision do it."""

    @property
    def state(self) -> dict[Any, Any]:
        """The optimizer's state by shards."""
        return {self.shard_of.get(each, each): entry for each, entry in self.optimizer.state.items()}

    @contextmanager
    def on_shards(self, *, others: bool = False) -> Iterator[None]:
        """Give the optimizer the shards inside; hooks of its step see the groups' whole parameters.

        Args:
            others: leave the parameters that aren't divided in their places, so that all keep their numbers.
        """
        if others:
            users = self.optimizer.param_groups
            groups = [[self.shard_of.get(each, each) for each in group["params"]] for group in users]
        else:
            groups = [list(group["params"]) for group in self._groups]
        with with_parameters(self.optimizer, groups):
            _rename(self.optimizer, self.shard_of)
            try:
                yield
            finally:
                _rename(self.optimizer, {shard: parameter for parameter, shard in self.shard_of.items()})

    def step(self) -> None:
        with self.on_shards():
            self.run_step()

    def state_dict(self) -> dict[str, Any]:
        with self.on_shards():
            return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.on_shards():
            self.optimizer.load_state_dict(state)


def _rename(optimizer: Optimizer, names: dict[torch.Tensor, torch.Tensor]) -> None:
    """Give the entries of an optimizer's state other keys."""
    state = optimizer.state
    for before, now in names.items():
        if before in state:
            state[now] = state.pop(before)
