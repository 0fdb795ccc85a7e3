"""Raise the learning rate with each optimizer step and record the loss: the callback of a range test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import Callback
from torchhal.tuning._learning_rates import LearningRates


class RangeTest(Callback):
    """Sets the learning rate of each optimizer step, records the loss, and ends the run with the last rate.

    The learning rate is that of the first parameter group; the others keep the ratio to it that
    ``configure_optimizers`` gave them. The run's schedulers are taken out of it.

    Args:
        rates: what to fill.
        stop_factor: end when the smoothed loss exceeds so many times its minimum, or isn't finite; None: never. See
            :meth:`diverges` for a minimum that isn't positive.
        smoothing: weight of the former average in the moving average of the losses, 0 to below 1.

    Raises:
        ConfigurationError: at the beginning of the run, on every rank: there isn't exactly one optimizer, or it has no
            learning rate to set.

    .. versionadded:: 0.2
    """

    def __init__(self, rates: LearningRates, stop_factor: float | None = 4.0, smoothing: float = 0.98) -> None:
        self.rates, self.stop_factor, self.smoothing = rates, stop_factor, smoothing
        self.average = 0.0
        """The moving average, which begins at 0."""
        self.minimum = math.inf
        """The least smoothed loss."""
        self.is_done = False
        self.first = math.nan
        """The first smoothed loss."""
        self._ratios: list[float] = []
        self._losses: list[float] = []
        """This rank's losses of the micro-batches since the last step."""
        self._step = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._step = trainer.global_step
        trainer.strategy.lr_scheduler_configs = []
        self._ratios = self.ratios(_groups(trainer.optimizers))

    def ratios(self, groups: list[dict[str, Any]]) -> list[float]:
        """Return the factor of each parameter group's learning rate."""
        rates = [float(group["lr"]) for group in groups]
        if any(rate != rates[0] for rate in rates) and not rates[0]:
            raise ConfigurationError(
                "a range test keeps the ratios of the parameter groups' learning rates to the first one, which is 0: "
                f"give the first group one in configure_optimizers (got {rates})"
            )
        return [rate / rates[0] if rates[0] else 1.0 for rate in rates]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.is_done:
            lr = self.rates.lr_of(len(self.rates.lr))
            for group, ratio in zip(_groups(trainer.optimizers), self._ratios, strict=True):
                _set(group, lr * ratio)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_done:
            return  # ranks agree to stop a few steps later
        loss = loss_of(outputs)
        if loss is not None:
            self._losses.append(loss)
        if trainer.global_step != self._step or (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._record(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        # a loader without a length ends within an accumulation, and the step follows its last batch
        if not self.is_done and trainer.global_step != self._step:
            self._record(trainer)

    def _record(self, trainer: Any) -> None:
        """Record the mean loss of a step's micro-batches."""
        losses, self._losses = self._losses, []
        loss = mean_over_ranks(trainer.strategy, self.loss_of_step(losses) if losses else None)
        is_stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if loss is not None and not is_stepped:
            return  # the precision skipped the step
        if loss is None:
            self.rates.add(math.nan, math.nan)
        else:
            smoothed = self.smooth(loss)
            if math.isnan(self.first):
                self.first = smoothed
            self.rates.diverged = self.diverges(smoothed)
            self.minimum = min(self.minimum, smoothed)
            self.rates.add(loss, smoothed)
        if self.rates.diverged or len(self.rates.lr) >= self.rates.num_steps:
            self.is_done = trainer.should_stop = True

    def loss_of_step(self, losses: list[float]) -> float:
        """Return the loss of an optimizer step from those of its micro-batches, of which there is one at least."""
        return sum(losses) / len(losses)

    def smooth(self, loss: float) -> float:
        """Return the moving average with one more loss, without the weight of its beginning at 0."""
        self.average = self.smoothing * self.average + (1 - self.smoothing) * loss
        count = sum(not math.isnan(each) for each in self.rates.loss) + 1
        return self.average / (1 - self.smoothing**count)

    def diverges(self, smoothed: float) -> bool:
        """Return whether the test ends at this smoothed loss.

        It does where the loss is ``stop_factor`` - 1 times its minimum above the minimum, which for a positive minimum
        is ``stop_factor`` times it. A minimum of 0 or below is no measure of a rise: its absolute value counts, or how
        far the loss had fallen to it, whichever is more.
        """
        if self.stop_factor is None:
            return False
        if not math.isfinite(smoothed):
            return True
        if math.isinf(self.minimum):
            return False
        scale = self.minimum if self.minimum > 0 else max(-self.minimum, self.first - self.minimum)
        return scale > 0 and smoothed - self.minimum > (self.stop_factor - 1) * scale


def loss_of(outputs: Any) -> float | None:
    """Return the loss of what ``training_step`` returned; None where it has none on this rank."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, torch.Tensor):
        return float(loss.detach().float().mean()) if loss.numel() else None  # of several micro-batches
    return loss if isinstance(loss, float) else None


def mean_over_ranks(strategy: Any, loss: float | None) -> float | None:
    """Return the mean of the losses that ranks have, the same on every rank; None where none has one."""
    if strategy.world_size == 1:
        return loss
    known = [each for each in strategy.all_gather_object(loss) if each is not None]
    return sum(known) / len(known) if known else None


def _groups(optimizers: list[Any]) -> list[dict[str, Any]]:
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers() must return one optimizer for a range test (got {len(optimizers)}): it gives one "
            "loss for each learning rate. Return one with a parameter group for each part instead"
        )
    groups: list[dict[str, Any]] = list(getattr(optimizers[0], "param_groups", ()))
    if not groups or any("lr" not in group for group in groups):
        raise ConfigurationError(
            f"a range test sets 'lr' in the parameter groups of the optimizer, and {type(optimizers[0]).__name__} has "
            "none there"
        )
    return groups


def _set(group: dict[str, Any], lr: float) -> None:
    for name in ("lr", "initial_lr"):
        if isinstance(group.get(name), torch.Tensor):  # of a captured or compiled step
            group[name].fill_(lr)
        else:
            group[name] = lr
