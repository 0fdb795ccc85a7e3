"""Report to Ray Tune: one trial is one fit, in the trial's own process or in workers that it has started."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchhal import Callback
from torchhal.errors import ConfigurationError, ModelError
from torchhal_ray import _driver_queue as driver_queue


def in_trial(ray: Any) -> bool:
    """Return True if this process runs a trial's function."""
    if "ray.tune" not in sys.modules or ray.get_runtime_context().get_actor_id() is None:
        return False
    return sys.modules["ray.tune"].get_context().get_trial_id() is not None


Letter = tuple[dict[str, float], dict[str, bytes] | None]
"""Metrics, and the files of a checkpoint by name."""


def report(letter: Letter) -> None:
    """Give a report to the trial, in its own process.

    Raises:
        SystemExit: the scheduler has ended the trial.
    """
    from ray import tune

    metrics, files = letter
    if files is None:
        tune.report(metrics)
        return
    with tempfile.TemporaryDirectory(prefix="torchhal-tune-") as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


class TuneReportCallback(Callback):
    """A callback that reports to Ray Tune after each validation but the sanity check's, from rank 0.

    When the trial's scheduler ends the trial, the fit ends there, with SystemExit, as Tune expects it.

    Args:
        metrics: what to report of ``trainer.callback_metrics``: a name, several, or a mapping from Tune's names to
            them. None: all.
        save_checkpoints: report a checkpoint, too, with everything that ``fit(ckpt_path=...)`` needs.
        filename: its name in the folder of ``tune.get_checkpoint()``.

    Raises:
        ConfigurationError: in ``fit``, where there is no trial; or with a checkpoint IO that writes more than a file.
        ModelError: a metric that was not logged, with those that were.
    """

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        *,
        save_checkpoints: bool = False,
        filename: str = "checkpoint.ckpt",
    ) -> None:
        if isinstance(metrics, str):
            metrics = [metrics]
        if metrics is not None and not isinstance(metrics, Mapping):
            metrics = {name: name for name in metrics}
        if not isinstance(filename, str) or os.path.basename(filename) != filename or not filename:
            raise ConfigurationError(f"'filename' must be the name of a file, without a folder (got {filename!r})")
        self.metrics = metrics
        self.save_checkpoints = save_checkpoints
        self.filename = filename

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self.save_checkpoints and "sharded" in trainer.strategy.checkpoint_io.features:
            raise ConfigurationError(
                "TuneReportCallback(save_checkpoints=True) hands one file to Tune, but this checkpoint IO writes one "
                "on each rank: use plugins='torch', or a ModelCheckpoint with a path on shared storage"
            )
        import ray

        if trainer.is_global_zero and driver_queue.post is None and not in_trial(ray):
            raise ConfigurationError(
                "TuneReportCallback has no trial to report to: make the Trainer in the function that tune.Tuner runs"
            )

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            return
        files = self._checkpoint(trainer) if self.save_checkpoints else None
        if trainer.is_global_zero:
            (driver_queue.post or report)((self._metrics(trainer), files))

    def _metrics(self, trainer: Any) -> dict[str, float]:
        known = trainer.callback_metrics
        names = self.metrics if self.metrics is not None else {name: name for name in known}
        if missing := sorted(set(names.values()) - set(known)):
            raise ModelError(
                f"TuneReportCallback is to report {', '.join(map(repr, missing))}, but after this validation there is "
                f"{', '.join(map(repr, sorted(known))) or 'nothing'}: log it with self.log"
            )
        return {name: float(known[of]) for name, of in names.items()}

    def _checkpoint(self, trainer: Any) -> dict[str, bytes] | None:
        """Write the checkpoint, on every rank; return the file on rank 0."""
        with tempfile.TemporaryDirectory(prefix="torchhal-tune-") as folder:
            path = Path(folder, self.filename)
            trainer.save_checkpoint(path)
            trainer.strategy.wait_for_checkpoints()
            return {self.filename: path.read_bytes()} if trainer.is_global_zero else None
