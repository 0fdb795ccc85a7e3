"""Step schedulers once for each epoch of the collaboration, on every peer alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer


class Schedule:
    """The schedulers of a run, which are stepped to the collaboration's epoch.

    A peer that takes over the state of others gets their learning rate with the optimizer's. A scheduler that
    computes the next rate from the present one would then decay it twice. So the groups' settings are kept here as
    the schedulers left them, and put back before they catch up.

    Args:
        configs: with ``scheduler`` and ``frequency``, in epochs of the collaboration.
        epoch: the one that the schedulers are at.
    """

    def __init__(self, optimizer: Optimizer, configs: Sequence[Any], epoch: int) -> None:
        self._optimizer = optimizer
        self._configs = configs
        self.epoch = epoch
        self._settings = self._now()

    def follow(self, epoch: int, *, replaced: bool) -> None:
        """Step to ``epoch``; ``replaced``: the optimizer's state is another peer's since the last call."""
        if replaced and self._configs:
            for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
                group.update(settings)
        for at in range(self.epoch + 1, epoch + 1):
            for config in self._configs:
                if at % config.frequency == 0:
                    config.scheduler.step()
        self.epoch = epoch
        self._settings = self._now()

    def restored(self, epoch: int) -> None:
        """Continue from a checkpoint of this epoch, from which optimizer and schedulers have been loaded."""
        self.epoch = epoch
        self._settings = self._now()

    def _now(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params"} for group in self._optimizer.param_groups
        ]
