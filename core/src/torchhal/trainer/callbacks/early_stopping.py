"""End training when a logged value stops improving, with EarlyStopping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from torchhal._arguments import check_bool, check_count
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._monitor import (
    check_mode,
    check_monitor,
    check_number,
    check_score,
    is_better,
    missing_metric,
    validates_once_per_epoch,
)
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class EarlyStopping(Callback):
    """Callback that stops the fit when ``monitor`` has not improved for ``patience`` checks in a row.

    Rank 0's value counts on every rank, so that all stop together. ``stopped_epoch`` is the epoch it stopped in
    (0 if it didn't), ``best_score`` the best value so far, ``wait_count`` the checks since then.

    Args:
        monitor: the logged value.
        min_delta: what counts as better must be better by more than this.
        patience: checks without improvement that are tolerated; a check is an epoch or a validation.
        verbose: print when the value improved, and why training stops.
        mode: ``"min"`` or ``"max"`` is better.
        strict: whether a value that was not logged is an error; False skips the check.
        check_finite: stop at once when the value is nan or infinite.
        stopping_threshold: stop at once when the value is better than this.
        divergence_threshold: stop at once when it is worse than this.
        check_on_train_epoch_end: True: check at the end of training epochs, False: after validations. By default
            the first where every epoch ends with its only validation or there is none.
        log_rank_zero_only: accepted for compatibility; messages always come from rank 0 alone.

    Raises:
        TypeError, ValueError: an argument outside its domain.
    """

    monitors = True
    """Its hooks at the end of an epoch run after the model's, when all values are logged."""

    @explain_unknown_arguments
    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self.monitor: str = check_monitor(monitor, optional=False)
        self.min_delta: float = check_number("min_delta", min_delta)
        if min_delta < 0:
            raise ValueError(f"'min_delta' must be 0 or more (got {min_delta!r})")
        self.patience = check_count("patience", patience, minimum=0)
        self.verbose = check_bool("verbose", verbose)
        self.mode = check_mode(mode)
        self.strict = check_bool("strict", strict)
        self.check_finite = check_bool("check_finite", check_finite)
        self.stopping_threshold: float | None = check_number("stopping_threshold", stopping_threshold, optional=True)
        self.divergence_threshold: float | None = check_number(
            "divergence_threshold", divergence_threshold, optional=True
        )
        self.check_on_train_epoch_end = (
            None
            if check_on_train_epoch_end is None
            else check_bool("check_on_train_epoch_end", check_on_train_epoch_end)
        )
        self.log_rank_zero_only = check_bool("log_rank_zero_only", log_rank_zero_only)
        self._reset_state()

    def _reset_state(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if self.mode == "min" else -math.inf)
        self.stop_reason = ""
        """The reason for which it has stopped the latest fit, or ""."""

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage == "fit":
            self.stop_reason = ""

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if self._checks_epochs(trainer):
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit" and not self._checks_epochs(trainer):
            self._check(trainer)

    def _checks_epochs(self, trainer: Trainer) -> bool:
        chosen = self.check_on_train_epoch_end
        return validates_once_per_epoch(trainer) if chosen is None else chosen

    def _check(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        metrics = trainer.callback_metrics
        value = metrics.get(self.monitor) if trainer.is_global_zero else None
        number: float | None = trainer.strategy.broadcast(None if value is None else float(value))
        if number is None:
            if self.strict:
                raise missing_metric(self, self.monitor, metrics)
            trainer.warn_once(f"EarlyStopping skips its check: {self.monitor!r} was not logged")
            return
        reason = self._judge(number)
        if reason:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stop_reason = f"{self.monitor}: {reason}"
        if self.verbose and reason is not None:
            trainer.print(f"{self.monitor}: {reason or f'improved to {number:.6g}'}")

    def _judge(self, value: float) -> str | None:
        """Return the reason to stop; "" if the value improved, None if it did not and there is patience left."""
        if self.check_finite and not math.isfinite(value):
            return f"stopping, as it is {value}; the best was {self.best_score:.6g}"
        if self.stopping_threshold is not None and is_better(self.mode, value, self.stopping_threshold):
            self._take_best(value)
            return f"stopping, as {value:.6g} is better than stopping_threshold={self.stopping_threshold}"
        if self.divergence_threshold is not None and is_better(self.mode, self.divergence_threshold, value):
            return f"stopping, as {value:.6g} is worse than divergence_threshold={self.divergence_threshold}"
        margin = self.min_delta if self.mode == "min" else -self.min_delta
        if is_better(self.mode, value + margin, float(self.best_score)):
            self._take_best(value)
            self.wait_count = 0
            return ""
        self.wait_count += 1
        if self.wait_count >= self.patience:
            return f"stopping, as it did not improve for {self.wait_count} check(s); the best was {self.best_score:.6g}"
        return None

    def _take_best(self, value: float) -> None:
        if is_better(self.mode, value, float(self.best_score)):
            self.best_score = torch.tensor(value, dtype=torch.float64)

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        return {"wait_count": self.wait_count, "stopped_epoch": self.stopped_epoch, "best_score": self.best_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counts = [check_count(name, state_dict[name], minimum=0) for name in ("wait_count", "stopped_epoch")]
        self.best_score = torch.as_tensor(check_score("best_score", state_dict["best_score"]))
        self.wait_count, self.stopped_epoch = counts
