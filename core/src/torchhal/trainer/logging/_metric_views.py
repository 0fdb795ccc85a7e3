"""Provide the newest value of each metric to callbacks, loggers and the progress bar."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchhal.trainer.logging._metric_accumulators import MetricAccumulator
from torchhal.trainer.logging._metric_payloads import Payload, to_host

# Bits of ``MetricAccumulator.unseen``: each reader clears its own when it has read the newest value of the step.
LOGGER, CALLBACK, BAR, LOGGED, RANKS = 1, 2, 4, 8, 16
ALL_READERS = LOGGER | CALLBACK | BAR | LOGGED | RANKS


@dataclass
class MetricViews:
    """The newest value of each name, for each of its readers.

    Attributes:
        callback: of ``trainer.callback_metrics``.
        logged: of ``trainer.logged_metrics``.
        bar: of ``trainer.progress_bar_metrics``, on any device.
        epoch_log: values of finalized epochs that were not sent to the loggers yet.
    """

    callback: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    bar: dict[str, Any] = field(default_factory=dict)
    epoch_log: dict[str, Tensor] = field(default_factory=dict)

    def update(
        self, reader: int, accumulators: Iterable[MetricAccumulator], stage: str | None = None
    ) -> dict[str, Any]:
        """Take over the values of steps that ``reader`` has not read yet; return these values by name.

        Args:
            reader: one of the bits above.
            accumulators: of all stages.
            stage: the stage to look at; None for all.
        """
        new: dict[str, Any] = {}
        for accumulator in accumulators:
            if accumulator.unseen & reader and (stage is None or accumulator.stage == stage):
                accumulator.unseen &= ~reader
                if reader == CALLBACK:
                    if accumulator.stage == "train":  # evaluation offers its epoch values only, as monitors expect
                        new[accumulator.plain_name] = new[accumulator.step_name] = accumulator.step_value()
                elif reader == BAR:
                    if accumulator.options.prog_bar:
                        new[accumulator.step_name] = accumulator.step
                elif accumulator.options.logger:
                    new[accumulator.step_name] = accumulator.step_value()
        if reader == CALLBACK:
            self.callback.update(new)
        elif reader == BAR:
            self.bar.update(new)
        elif reader == LOGGED:
            self.logged.update(new)
        return new

    def publish(self, payload: Payload, value: Tensor) -> tuple[str, str]:
        """Take over the value of an epoch; return the two names that it has, which may be the same."""
        name, suffix = payload["name"], payload["suffix"]
        plain = name + suffix
        epoch = f"{name}_epoch{suffix}" if payload["both"] else plain
        self.callback[plain] = self.callback[epoch] = value
        if payload["logger"]:
            self.logged[epoch] = self.epoch_log[epoch] = value
        if payload["prog_bar"]:
            self.bar[epoch] = value
        return plain, epoch

    def take_epoch_log(self) -> dict[str, Tensor]:
        """Return the values of epochs that were finalized since the last call."""
        finished, self.epoch_log = self.epoch_log, {}
        return finished


class EpochValues:
    """The values of the last epoch of each stage."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, tuple[Any, set[int]]]] = {}
        self._ended: set[str] = set()

    def end(self, stage: str) -> None:
        """End the epoch of ``stage``: its values stay until the next one is finalized."""
        self._ended.add(stage)

    def start(self, stage: str) -> None:
        """Drop the values of the last epoch of ``stage`` if it has ended."""
        if stage in self._ended:
            self._ended.remove(stage)
            self._values.pop(stage, None)

    def add(self, stage: str, names: Iterable[str], value: Any, loaders: set[int]) -> None:
        """Add a value under each of ``names``, of some dataloaders; of all where there is none among them."""
        values = self._values.setdefault(stage, {})
        for name in names:
            values[name] = value, loaders

    def by_dataloader(self, stage: str, num_dataloaders: int) -> list[dict[str, float]]:
        """Return the values of each dataloader, as numbers by name."""
        values = self._values.get(stage, {})
        numbers = to_host(value for value, _ in values.values())
        return [
            {
                name: float(number)
                for (name, (_, loaders)), number in zip(values.items(), numbers, strict=True)
                if not loaders or index in loaders
            }
            for index in range(num_dataloaders)
        ]
