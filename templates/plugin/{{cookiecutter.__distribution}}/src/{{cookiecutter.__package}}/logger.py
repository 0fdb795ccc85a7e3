"""The logger of {{ cookiecutter.project_name }}."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torchhal.trainer.loggers import Logger


class {{ cookiecutter.__class }}Logger(Logger):
    """Logger that appends a line of JSON for each call to one file.

    Write to the service in :meth:`save`: what it has returned from survives the death of the process. Open a client
    there too, and not before: a Trainer that is made need not fit.

    Args:
        save_dir: the folder of the file; the Trainer's ``default_root_dir`` where the logger is named by its alias.
    """

    def __init__(self, save_dir: str | os.PathLike[str] = ".") -> None:
        self._save_dir = os.path.abspath(os.fspath(save_dir))
        self._lines: list[str] = []

    @property
    def save_dir(self) -> str:
        return self._save_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._lines.append(json.dumps({"step": step, **{name: float(value) for name, value in metrics.items()}}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        given = params if isinstance(params, Mapping) else vars(params)
        self._lines.append(json.dumps({"hyperparameters": {str(name): str(value) for name, value in given.items()}}))

    def save(self) -> None:
        if not self._lines:
            return
        os.makedirs(self._save_dir, exist_ok=True)
        path = os.path.join(self._save_dir, "{{ cookiecutter.__alias }}.jsonl")
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._lines)
            file.flush()
            os.fsync(file.fileno())
        self._lines = []
