"""Hold what a learning-rate range test has measured, suggest a learning rate, and plot both."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torchhal.errors import ConfigurationError

_log = logging.getLogger("torchhal")

MODES = ("exponential", "linear")


class LearningRates:
    """The losses of a range test by learning rate.

    Args:
        mode: ``"exponential"``, each rate is a constant multiple of the one before, or ``"linear"``.
        min_lr: the first learning rate.
        max_lr: the last one.
        num_steps: the number of learning rates.

    Attributes:
        lr: the learning rates that were tried, in their order.
        loss: the training loss at each, a mean over the step's micro-batches and the ranks; NaN where ``training_step``
            returned none.
        smoothed: the exponential moving average of ``loss`` at each.
        diverged: True if the test ended early because the loss grew too far.

    .. versionadded:: 0.2
    """

    def __init__(self, mode: str, min_lr: float, max_lr: float, num_steps: int) -> None:
        self.mode, self.min_lr, self.max_lr, self.num_steps = mode, min_lr, max_lr, num_steps
        self.lr: list[float] = []
        self.loss: list[float] = []
        self.smoothed: list[float] = []
        self.diverged = False

    def lr_of(self, step: int) -> float:
        """Return the learning rate of a step, from 0 to ``num_steps`` - 1."""
        share = step / max(1, self.num_steps - 1)
        if self.mode == "linear":
            return self.min_lr + share * (self.max_lr - self.min_lr)
        return float(self.min_lr * (self.max_lr / self.min_lr) ** share)

    def add(self, loss: float, smoothed: float) -> None:
        """Add the loss at the next learning rate."""
        self.lr.append(self.lr_of(len(self.lr)))
        self.loss.append(loss)
        self.smoothed.append(smoothed)

    def suggestion(self) -> float | None:
        """Return the learning rate at which the loss falls most steeply, over the axis of the plot.

        The slope at a step is the mean loss of the steps after it less that of the steps before it, of a tenth of all
        each: the loss of one batch, or of a moving average that has just begun, is mostly noise.

        Returns:
            None where there are too few finite losses, or the loss falls nowhere.
        """
        known = [(lr, loss) for lr, loss in zip(self.lr, self.loss, strict=True) if math.isfinite(loss)]
        width = max(1, len(self.lr) // 10)
        slopes = {
            known[at][0]: _mean(known[at + 1 : at + 1 + width]) - _mean(known[at - width : at])
            for at in range(width, len(known) - width)
        }
        if not known and self.loss:
            _log.warning(
                "no learning rate can be suggested: the loss is not finite from the first step on, whose lr is %g. "
                "Look for the cause in the model or its data",
                self.lr[0],
            )
            return None
        if not slopes:
            _log.warning("no learning rate can be suggested from %d loss(es): try more steps", len(known))
            return None
        steepest = min(slopes, key=slopes.__getitem__)
        if slopes[steepest] >= 0:
            _log.warning("no learning rate can be suggested: the loss does not fall at any of %d", len(known))
            return None
        return steepest

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, such as JSON can hold but for NaN and infinite losses."""
        return {
            "mode": self.mode,
            "min_lr": self.min_lr,
            "max_lr": self.max_lr,
            "num_steps": self.num_steps,
            "lr": list(self.lr),
            "loss": list(self.loss),
            "smoothed": list(self.smoothed),
            "diverged": self.diverged,
            "suggestion": self.suggestion(),
        }

    def plot(self, ax: Any = None, *, suggest: bool = True) -> Any:
        """Plot the smoothed losses over the learning rates, by matplotlib.

        The axis of the losses leaves out how far they grew after their minimum.

        Args:
            ax: matplotlib's axes to draw in; None for a figure of its own, which no window shows.
            suggest: mark the suggestion.

        Returns:
            The figure; ``figure.savefig("lr.png")`` writes it.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        if ax is None:
            try:
                from matplotlib.figure import Figure
            except ImportError as error:
                raise ConfigurationError(
                    "a plot of learning rates needs matplotlib: pip install 'torchhal[report]'"
                ) from error
            ax = Figure(layout="constrained").subplots()
        ax.plot(self.lr, self.smoothed)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        finite = [loss for loss in self.smoothed if math.isfinite(loss)]
        if finite and (height := max(finite[: finite.index(min(finite)) + 1]) - min(finite)) > 0:
            ax.set_ylim(min(finite) - 0.1 * height, min(finite) + 1.3 * height)
        if suggest and (lr := self.suggestion()) is not None:
            ax.plot(lr, self.smoothed[self.lr.index(lr)], markersize=10, marker="o", color="red")
        return ax.figure

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mode!r}, {len(self.lr)} of {self.num_steps} steps)"


def _mean(measured: Sequence[tuple[float, float]]) -> float:
    return sum(loss for _, loss in measured) / len(measured)
