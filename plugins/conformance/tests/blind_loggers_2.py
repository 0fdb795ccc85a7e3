"""More loggers of one defect each, written from the contract by somebody who had read no check."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from blind_loggers import JsonLines, caught_by

from torchhal.trainer.loggers import as_dict, is_rank_zero


class _Tee:
    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.text: list[str] = []

    def write(self, text: str) -> int:
        self.text.append(text)
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@caught_by("LOG-01")
class FolderAtOnce(JsonLines):
    """Creates its folder when it is made, so that a bad path is seen early."""

    # FolderLogger: "`save_dir/name/version_N`, which is created with the first write"; Logger: "The Trainer calls the
    # methods on rank 0 only".
    # Each rank makes its own logger, and so a folder: a job of 8 leaves up to 8 of them, and their versions differ.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        os.makedirs(self.log_dir, exist_ok=True)


@caught_by("LOG-01")
class FolderWhenRead(JsonLines):
    """Creates the folder of the run when its path is read, so that the user can write there."""

    # Logger: "The Trainer calls the methods on rank 0 only, and reads the properties on every rank."
    # Every rank creates it, also for a run that logs nothing.

    @property
    def log_dir(self) -> str:
        folder = super().log_dir
        os.makedirs(folder, exist_ok=True)
        return folder


@caught_by("LOG-09")
class PathsOnRankZero(JsonLines):
    """Knows the folder of its run where it writes, on rank 0, alone."""

    # Logger: "reads the properties on every rank"; log_dir: "checkpoints go below it by default".
    # The ranks write the parts of one checkpoint into different folders.

    @property
    def log_dir(self) -> str:
        return super().log_dir if is_rank_zero() else "."


@caught_by("LOG-02")
class NoNonFinite(JsonLines):
    """Leaves out what JSON has no number for."""

    # log_metrics: "Record the numbers of one step".
    # A loss that becomes NaN ends in the plot as if the run had stopped there; nobody sees that it diverged.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        finite = {name: value for name, value in metrics.items() if abs(float(value)) < float("inf")}
        super().log_metrics(finite, step)


@caught_by("LOG-02")
class FloatsOnly(JsonLines):
    """Records the values that are floats."""

    # log_metrics: "numbers by name".
    # Counts, such as the epoch, are lost.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if isinstance(value, float)}, step)


@caught_by("LOG-02")
class SafeNames(JsonLines):
    """Replaces what its service doesn't allow in a name by an underscore."""

    # log_metrics: "metrics: numbers by name."
    # "loss/val" and "loss_val" become one name, and one of the values is lost.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        safe = {"".join(c if c.isalnum() else "_" for c in name): value for name, value in metrics.items()}
        super().log_metrics(safe, step)


@caught_by("LOG-02")
class WritesLater(JsonLines):
    """Keeps the mapping that it is given, and reads it when the block is written."""

    # log_metrics: "Record the numbers of one step".
    # A caller that fills one dict for each step gets the last values in every row.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: list[tuple[Mapping[str, float], int | None]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._rows.append((metrics, step))

    def save(self) -> None:
        rows, self._rows = self._rows, []
        for metrics, step in rows:
            super().log_metrics(metrics, step)
        super().save()


@caught_by("LOG-03")
class TruthOfParams(JsonLines):
    """Leaves out the hyperparameters that aren't set."""

    # log_hyperparams: "Record the hyperparameters."
    # A dropout of 0.0 and a switch that is False aren't recorded.

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().log_hyperparams({name: value for name, value in as_dict(params).items() if value})


@caught_by("LOG-03")
class ParamsAsText(JsonLines):
    """Replaces the hyperparameters that JSON has no type for by text, in the user's dict."""

    # log_hyperparams: "Record the hyperparameters."
    # The user's `hparams` have the text of a function or a path in its place.

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        own = params if isinstance(params, dict) else vars(params)
        for name, value in own.items():
            if not isinstance(value, bool | int | float | str | None):
                own[name] = str(value)
        super().log_hyperparams(params)


@caught_by("LOG-03")
class FlattensParams(JsonLines):
    """Flattens nested hyperparameters in the user's dict."""

    # log_hyperparams: "Record the hyperparameters."
    # `module.hparams["optimizer"]["lr"]` is a KeyError from then on.

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        own = params if isinstance(params, dict) else vars(params)
        for name in [name for name, value in own.items() if isinstance(value, dict)]:
            own.update({f"{name}/{inner}": value for inner, value in own.pop(name).items()})
        super().log_hyperparams(params)


@caught_by("LOG-10")
class SilentWriter(JsonLines):
    """Goes on where the file can't be written: logging must not end a run."""

    # Logger: "A logger that can't write must raise an error: a run must not continue silently without its record."

    def save(self) -> None:
        try:
            super().save()
        except OSError:
            self._lines.clear()


@caught_by("LOG-04")
class SuccessOnly(JsonLines):
    """Writes the rest of a run that has succeeded."""

    # finalize: "Finish one call of the Trainer ... status: "success", "failed" or "interrupted"."
    # What led to a failure is what a user wants to see, and isn't there.

    def finalize(self, status: str) -> None:
        if status == "success":
            self.save()


@caught_by("LOG-04")
class ClosedForGood(JsonLines):
    """Takes nothing more after the end of the first call."""

    # finalize: "Finish one call of the Trainer, which more may follow."
    # The test after a fit isn't recorded.

    closed = False

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.closed = True

    def _add(self, row: dict[str, Any]) -> None:
        if not self.closed:
            super()._add(row)


@caught_by("LOG-04")
class Truncates(JsonLines):
    """Opens its file anew in each process and after each call."""

    # FolderLogger.__getstate__: "a copy, which writes to the same run in another process"; finalize: "Finish one call
    # of the Trainer, which more may follow."
    # The test deletes what the fit has recorded.

    opened = False

    def save(self) -> None:
        if self._lines and not self.opened and os.path.exists(self.file):
            os.remove(self.file)
        self.opened = self.opened or bool(self._lines)
        super().save()

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.opened = False


@caught_by("LOG-11")
class SharedBuffer(JsonLines):
    """Has one buffer for all objects of the class."""

    # Logger: "record the metrics and hyperparameters of a run".
    # The rows of two loggers end in the file of the one that writes first.

    _all: ClassVar[list[str]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines = self._all

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lines=self._all)


@caught_by("LOG-06")
class CapturesConsole(JsonLines):
    """Wraps the console to record it, and leaves it wrapped."""

    # Logger: "record the metrics and hyperparameters of a run".
    # Each call wraps it once more, and what replaces sys.stdout for a while, as a test does, is lost.

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().log_hyperparams(params)
        sys.stdout = _Tee(sys.stdout)


@caught_by("LOG-12")
class ClosesFigures(JsonLines):
    """Closes the figure that it has saved."""

    # log_figure: "a matplotlib.figure.Figure, which is left open."
    # A second logger, or the user's next line, has no figure.

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        from matplotlib import pyplot

        os.makedirs(self.log_dir, exist_ok=True)
        figure.savefig(os.path.join(self.log_dir, f"{abs(hash(key))}_{step}.png"))
        pyplot.close(figure)


@caught_by("LOG-12")
class ScalesImages(JsonLines):
    """Brings an image to 0 to 255 in the user's tensor."""

    # log_image: "of floats between 0 and 1".
    # The next logger of the same image, or the model, gets other values.

    def log_image(self, key: str, images: Any, step: int | None = None) -> None:
        for image in images if isinstance(images, list) else [images]:
            if isinstance(image, torch.Tensor) and image.is_floating_point():
                image.mul_(255)


@caught_by("LOG-12")
class RefusesTexts(JsonLines):
    """Has no place for texts, and raises an error."""

    # log_text: "a logger with no place for texts leaves it out"

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        raise NotImplementedError("JsonLines records numbers only")


@caught_by("LOG-09")
class OwnOnError(JsonLines):
    """Declares a way of its own to treat errors."""

    # on_error: "What the Trainer does when a method raises: "warn", once per run, or "raise"."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_error = "ignore"


@caught_by("LOG-09")
class PathObjects(JsonLines):
    """Returns its folders as paths."""

    # save_dir, root_dir, log_dir: "-> str | None"
    # `trainer.default_root_dir + "/x"` and a checkpoint with the path in it fail.

    @property
    def save_dir(self) -> Any:
        return Path(super().save_dir)


@caught_by("LOG-07")
class NeedsBestCheckpoint(JsonLines):
    """Records the best checkpoint by the score that it has."""

    # after_save_checkpoint: "Called on rank 0 after each save."
    # A ModelCheckpoint without `monitor` has no score: the first checkpoint ends in an error.

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.log_metrics({"best": float(checkpoint_callback.best_model_score)})


@caught_by("LOG-02")
class AddsStepFirst(JsonLines):
    """Puts the step into the mapping that it was given, and records it as a metric."""

    # log_metrics: "The caller may change the mapping after the call", and Logger: "A logger changes nothing of what it
    # is given".
    # The next logger of the Trainer gets it as one more metric.

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        metrics["trainer/step"] = -1 if step is None else step
        super().log_metrics(metrics, step)


@caught_by("LOG-02")
class RaisesWithoutStep(JsonLines):
    """Counts on a step."""

    # log_metrics: "None for metrics that belong to no step".
    # What a user logs without one is an error.

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, int(step))  # type: ignore[arg-type]


@caught_by("LOG-02")
class LastRowPerStep(JsonLines):
    """Keeps one row of each step, the last."""

    # log_metrics: "Record the numbers of one step, or of an epoch that ended at this step."
    # The values of an epoch replace those of its last step.

    def save(self) -> None:
        kept: dict[Any, str] = {}
        for line in self._lines:
            row = json.loads(line)
            kept["params" in row, row.get("step")] = line
        self._lines = list(kept.values())
        super().save()


@caught_by("LOG-04")
class FinalizeForgets(JsonLines):
    """Writes in save() alone, and has no end."""

    # finalize: "what was logged is written then".
    # What was logged after the last epoch is lost.

    block = 10**9

    def finalize(self, status: str) -> None:
        pass


@caught_by("LOG-06")
class DrawsInInit(JsonLines):
    """Draws the id of its run from torch's generator when it is made."""

    # Logger: "A logger changes nothing of what it is given, nor the random numbers ... of the process".
    # A model that is made after it has other weights.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.id = int(torch.randint(0, 2**31, ()))
