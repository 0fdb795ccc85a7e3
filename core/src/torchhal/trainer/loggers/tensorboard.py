"""Write metrics as event files for TensorBoard, with TensorBoardLogger."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Mapping
from typing import Any

from torchhal.trainer._unknown_arguments import refuse_unknown
from torchhal.trainer.loggers.base import FolderLogger, NullExperiment, as_dict, is_rank_zero
from torchhal.trainer.loggers.images import as_pixels

_OWN = ("save_dir", "name", "version", "prefix")


class TensorBoardLogger(FolderLogger):
    """Logger that writes an event file to ``save_dir/name/version_N``; needs the package ``tensorboard``.

    The calls of a Trainer, ``fit``, then ``test``, write to one file, which is closed with the logger or the program.

    Args:
        save_dir: the folder of all experiments; by default that of the process.
        name: the experiment; "" for none.
        version: the run, a number or a name; None for a new one.
        prefix: put before every metric's name, with a dash.
        on_error: ``"warn"`` when something can't be written, and go on with the run, or ``"raise"``.
        **writer_options: for ``torch.utils.tensorboard.SummaryWriter``, e.g. ``flush_secs``.

    Raises:
        ModuleNotFoundError: ``tensorboard`` is not installed.
        UnknownArgumentError: the writer has no such option.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = ".",
        name: str | None = "torchhal_logs",
        version: int | str | None = None,
        prefix: str = "",
        *,
        on_error: str = "warn",
        **writer_options: Any,
    ) -> None:
        super().__init__(save_dir, name, version, on_error=on_error)
        self._prefix = f"{prefix}-" if prefix else ""
        self._options = writer_options
        self._writer: Any = None
        self._process = 0
        self._hparams: dict[str, Any] = {}
        writer = self._writer_class()  # raises for a missing package here, not after the first epoch
        options = [name for name in inspect.signature(writer).parameters if name != "log_dir"]
        refuse_unknown("TensorBoardLogger()", writer_options, [*_OWN, *options])

    @staticmethod
    def _writer_class() -> Any:
        try:
            import tensorboard  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "TensorBoardLogger needs the package tensorboard, which is not installed: "
                "pip install torchhal[tensorboard]",
                name="tensorboard",
            ) from error
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter``, made at the first use; on ranks other than 0 an object that ignores every call."""
        if not is_rank_zero():
            return NullExperiment()
        if self._writer is None or self._process != os.getpid():  # a forked process has no writer thread
            self._writer, self._process = self._writer_class()(log_dir=self.log_dir, **self._options), os.getpid()
            weakref.finalize(self, _close, self._writer, self._process)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not is_rank_zero():
            return
        writer = self.experiment
        for name, value in metrics.items():
            writer.add_scalar(self._prefix + name, float(value), step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if not is_rank_zero():
            return
        self._hparams.update(as_dict(params))
        if not self._hparams:
            return
        from torch.utils.tensorboard.summary import hparams

        plain = {
            str(name): value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in self._hparams.items()
        }
        file_writer = self.experiment._get_file_writer()
        for summary in hparams(plain, {}):  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        self.experiment.add_text(self._prefix + key, text, step)

    def log_image(self, key: str, images: Any, step: int | None = None) -> None:
        if not is_rank_zero():
            return
        for number, image in enumerate(several := images if isinstance(images, list | tuple) else [images]):
            name = f"{self._prefix}{key}" + (f"/{number}" if len(several) > 1 else "")
            pixels = as_pixels(image)
            self.experiment.add_image(name, pixels, step, dataformats="HWC" if pixels.ndim == 3 else "HW")

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        self.experiment.add_figure(self._prefix + key, figure, step, close=False)

    def save(self) -> None:
        """Flush everything to the file.

        Raises:
            OSError: it could not be written, at once or by the writer's thread before.
        """
        if self._writer is not None and self._process == os.getpid():
            self._writer.flush()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which makes a writer of its own: one is an open file and a thread."""
        return {**super().__getstate__(), "_writer": None}


def _close(writer: Any, pid: int) -> None:
    """Close ``writer`` if this process opened it."""
    if os.getpid() == pid:
        writer.close()
