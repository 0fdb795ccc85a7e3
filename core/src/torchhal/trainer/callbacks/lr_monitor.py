"""Log the learning rates of a run, with LearningRateMonitor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torchhal._arguments import check_bool
from torchhal.errors import ConfigurationError
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class LearningRateMonitor(Callback):
    """Callback that sends the learning rates to the loggers, as ``lr-<optimizer class>`` or the scheduler's own name.

    Several optimizers of one class are numbered from the second on (``lr-SGD-1``); several parameter groups get
    ``/pg1``, ``/pg2``, ... The rates are also in ``trainer.callback_metrics``.

    Args:
        logging_interval: ``"step"``: every ``log_every_n_steps`` steps; ``"epoch"``: when an epoch begins; None: each
            as often as its scheduler moves it, and once per epoch without a scheduler.
        log_momentum: also log momentum, or the first beta, with ``-momentum`` at the end of the name.
        log_weight_decay: also log weight decay, with ``-weight_decay``.
    """

    @explain_unknown_arguments
    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ValueError(f"'logging_interval' must be 'step', 'epoch' or None (got {logging_interval!r})")
        self.logging_interval = logging_interval
        self.log_momentum = check_bool("log_momentum", log_momentum)
        self.log_weight_decay = check_bool("log_weight_decay", log_weight_decay)
        self._logged_step = -1
        if logging_interval != "epoch":  # else nothing is called per batch
            self.on_train_batch_start = self._log_step  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Raise ConfigurationError for a Trainer without loggers, unless it is a trial run."""
        self._logged_step = -1
        if not trainer.loggers and not trainer.fast_dev_run:  # which has none
            raise ConfigurationError(
                "LearningRateMonitor needs a logger to send the rates to, and the Trainer has none: pass logger=True "
                "or a logger, or leave the callback out"
            )

    def _log_step(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        every, step = trainer.log_every_n_steps, trainer.global_step
        if every and step % every == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(trainer, None if self.logging_interval == "step" else "step")

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if self.logging_interval != "step":
            self._log(trainer, None if self.logging_interval == "epoch" else "epoch")

    def _log(self, trainer: Trainer, interval: str | None) -> None:
        """Send the rates that their schedulers change once per ``interval``; None for all."""
        rates = dict(self._rates(trainer, interval))
        if not rates:
            return
        trainer.callback_metrics.update({name: torch.tensor(rate, dtype=torch.float64) for name, rate in rates.items()})
        trainer.call_loggers("log_metrics", rates, trainer.global_step)

    def _rates(self, trainer: Trainer, interval: str | None) -> Iterator[tuple[str, float]]:
        schedules: dict[int, Any] = {}
        for config in trainer.lr_scheduler_configs:
            optimizer = getattr(config.scheduler, "optimizer", None)
            if optimizer is not None:
                schedules.setdefault(id(optimizer), config)
        seen: Counter[str] = Counter()
        for optimizer in trainer.optimizers:
            schedule = schedules.get(id(optimizer))
            own_name = getattr(schedule, "name", None)
            base = own_name or f"lr-{type(optimizer).__name__}"
            name = base if not seen[base] else f"{base}-{seen[base]}"
            seen[base] += 1
            if interval is None or interval == getattr(schedule, "interval", "epoch"):
                yield from self._of_groups(optimizer, name)

    def _of_groups(self, optimizer: Optimizer, name: str) -> Iterator[tuple[str, float]]:
        groups = optimizer.param_groups
        for index, group in enumerate(groups, start=1):
            label = f"{name}/pg{index}" if len(groups) > 1 else name
            yield label, float(group["lr"])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum")
                if momentum is not None:
                    yield f"{label}-momentum", float(momentum)
            if self.log_weight_decay and group.get("weight_decay") is not None:
                yield f"{label}-weight_decay", float(group["weight_decay"])
