"""Lightning's loggers: torchhal's under their names and with their default folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torchhal.trainer import loggers
from torchhal_lightning.stand_in._missing import missing
from torchhal_lightning.stand_in.pytorch.loggers import logger
from torchhal_lightning.stand_in.pytorch.loggers.logger import DummyLogger, Logger, rank_zero_experiment
from torchhal_lightning.stand_in.pytorch.utilities.rank_zero import rank_zero_only

_INSTEAD = "Write it in nine lines, a subclass of Logger with log_metrics(metrics, step), or install Lightning."

CometLogger = missing("CometLogger", _INSTEAD)
LitLogger = missing("LitLogger", _INSTEAD)
MLFlowLogger = missing("MLFlowLogger", _INSTEAD)
NeptuneLogger = missing("NeptuneLogger", _INSTEAD)
WandbLogger = missing("WandbLogger", _INSTEAD)


class CSVLogger(loggers.CSVLogger, Logger):
    """Writes ``metrics.csv`` and ``hparams.yaml``.

    Args:
        save_dir: the folder of all experiments.
        name: of the experiment.
        version: of the run.
        prefix: put before every name, with a dash.
        flush_logs_every_n_steps: rows that are kept in memory.
    """

    HPARAMS_FILE = "hparams.yaml"  # in JSON, which YAML includes

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, flush_logs_every_n_steps)
        self._prefix = f"{prefix}-" if prefix else ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._prefix:
            metrics = {self._prefix + name: value for name, value in metrics.items()}
        super().log_metrics(metrics, step)


class TensorBoardLogger(loggers.TensorBoardLogger, Logger):
    """Writes an event file for TensorBoard.

    Args:
        save_dir: the folder of all experiments.
        name: of the experiment.
        version: of the run.
        log_graph: whether the model's graph is recorded when a fit begins, for ``model.example_input_array``.
        default_hp_metric: whether ``hp_metric`` is written beside hyperparameters that have no metrics of their own.
        prefix: put before every name, with a dash.
        sub_dir: below the run's folder.
        kwargs: of ``SummaryWriter``.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, **kwargs)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)

    @property
    def sub_dir(self) -> str | None:
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        folder = super().log_dir
        return folder if self._sub_dir is None else os.path.join(folder, self._sub_dir)

    def log_hyperparams(self, params: Any, metrics: Any = None, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters, in ``hparams.yaml`` too.

        Args:
            params: a dict or a namespace.
            metrics: numbers by name that belong to them, or one number.
            args: not used.
            kwargs: not used.
        """
        super().log_hyperparams(params)
        if rank_zero_only.rank:
            return
        os.makedirs(self.log_dir, exist_ok=True)
        with open(os.path.join(self.log_dir, "hparams.yaml"), "w", encoding="utf-8") as file:
            json.dump(self._hparams, file, indent=2, default=str)  # which YAML includes
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        if metrics:
            self.log_metrics(metrics, 0)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the model's graph, where ``log_graph=True``."""
        sample = getattr(model, "example_input_array", None) if input_array is None else input_array
        if self._log_graph and sample is not None:
            self.experiment.add_graph(model, sample)


__all__ = [
    "CSVLogger",
    "CometLogger",
    "DummyLogger",
    "LitLogger",
    "Logger",
    "MLFlowLogger",
    "NeptuneLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "logger",
    "rank_zero_experiment",
]
