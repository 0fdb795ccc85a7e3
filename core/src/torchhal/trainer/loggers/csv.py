"""Write metrics as a table in a CSV file, with CSVLogger."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchhal._arguments import check_count
from torchhal.checkpoint._temp_files import new_temporary_name
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.loggers.base import FolderLogger, as_dict, is_rank_zero


class CSVLogger(FolderLogger):
    """Logger that writes ``metrics.csv`` and ``hparams.json`` to ``save_dir/name/version_N``.

    A row for each call, a column for each name; when a new name appears the table is written anew with one column
    more. Rows are kept in memory until there are ``flush_logs_every_n_steps`` of them, :meth:`save` is called or the
    Trainer is done. Even after a kill the file has a whole header and whole rows; the next run with the same
    ``version`` appends to it.

    Args:
        save_dir: the folder of all experiments; by default that of the process.
        name: the experiment; "" for none.
        version: the run, a number or a name; None for a new one.
        flush_logs_every_n_steps: how many rows to keep in memory at most.
        on_error: ``"warn"`` when something can't be written, and go on with the run, or ``"raise"``.
    """

    METRICS_FILE = "metrics.csv"
    HPARAMS_FILE = "hparams.json"

    @explain_unknown_arguments
    def __init__(
        self,
        save_dir: str | os.PathLike[str] = ".",
        name: str | None = "torchhal_logs",
        version: int | str | None = None,
        flush_logs_every_n_steps: int = 100,
        *,
        on_error: str = "warn",
    ) -> None:
        super().__init__(save_dir, name, version, on_error=on_error)
        self._flush_every = check_count("flush_logs_every_n_steps", flush_logs_every_n_steps, minimum=1)
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] | None = None  # of the file; None before it was read
        self._hparams: dict[str, Any] = {}

    @property
    def metrics_path(self) -> str:
        return os.path.join(self.log_dir, self.METRICS_FILE)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not is_rank_zero():
            return
        row: dict[str, Any] = {"step": "" if step is None else step}
        row.update((name, float(value)) for name, value in metrics.items() if name != "step")
        if isinstance(metrics.get("epoch"), int):
            row["epoch"] = metrics["epoch"]
        self._rows.append(row)
        if len(self._rows) >= self._flush_every:
            self.save()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if not is_rank_zero():
            return
        self._hparams.update(as_dict(params))
        os.makedirs(self.log_dir, exist_ok=True)
        text = json.dumps(self._hparams, indent=2, default=str) + "\n"
        self._replace(os.path.join(self.log_dir, self.HPARAMS_FILE), text.encode())

    def save(self) -> None:
        """Append the rows in memory to the file.

        Raises:
            OSError: it can't be written; the rows are kept and the file is as it was.
        """
        if not self._rows or not is_rank_zero():
            return
        os.makedirs(self.log_dir, exist_ok=True)
        if self._columns is None:
            self._columns = self._read_columns()
        new = list(dict.fromkeys(name for row in self._rows for name in row if name not in self._columns))
        if new:
            columns = self._columns + new
            table = _table(columns, self._read_rows(), header=True) + _table(columns, self._rows)
            self._replace(self.metrics_path, table)
            self._columns = columns
        else:
            self._append(_table(self._columns, self._rows))
        self._rows.clear()

    def _read_columns(self) -> list[str]:
        """Return the columns of a file that an earlier run left, and cut off a row that it was killed while writing."""
        try:
            with open(self.metrics_path, "rb+") as file:
                content = file.read()
                whole = content.rfind(b"\n") + 1
                if whole < len(content):
                    file.truncate(whole)
        except FileNotFoundError:
            return []
        return next(csv.reader(io.StringIO(content[:whole].decode())), [])

    def _read_rows(self) -> list[dict[str, Any]]:
        try:
            with open(self.metrics_path, newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
        except FileNotFoundError:
            return []

    def _append(self, rows: bytes) -> None:
        with open(self.metrics_path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                written = 0
                while written < len(rows):
                    written += file.write(rows[written:])
            except OSError as error:
                with suppress(OSError):
                    file.truncate(size)
                raise OSError(error.errno, f"metrics can't be written: {error.strerror}", self.metrics_path) from error

    def _replace(self, path: str, content: bytes) -> None:
        """Write a whole file in one step, so that readers find the old or the new one, also after a kill."""
        temporary = os.path.join(os.path.dirname(path), new_temporary_name())
        try:
            with open(temporary, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise OSError(error.errno, f"logs can't be written: {error.strerror}", path) from error


def _table(columns: list[str], rows: list[dict[str, Any]], *, header: bool = False) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
