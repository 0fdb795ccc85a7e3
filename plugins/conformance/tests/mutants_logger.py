"""Loggers that are each broken in one way, over core's CSVLogger."""

import json
import os
import random
import threading

import torch
from logger_rows import read_csv
from zoo import caught_by

from torchhal.trainer.loggers import CSVLogger


@caught_by("LOG-01")
class OpensAtOnce(CSVLogger):
    """Has its file before there is something to write."""

    def __init__(self, save_dir="."):
        super().__init__(save_dir)
        os.makedirs(self.log_dir, exist_ok=True)
        with open(self.metrics_path, "a"):
            pass


@caught_by("LOG-01")
class StartsAThread(CSVLogger):
    """Waits for something to send from the beginning on."""

    def __init__(self, save_dir="."):
        super().__init__(save_dir)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@caught_by("LOG-02")
class AllowsIdentifiers(CSVLogger):
    """Refuses the names that its service refuses."""

    def log_metrics(self, metrics, step=None):
        for name in metrics:
            if not name.replace("/", "").replace("_", "").isalnum():
                raise ValueError(f"no name of a metric: {name!r}")
        super().log_metrics(metrics, step)


@caught_by("LOG-02")
class WantsSteps(CSVLogger):
    """Counts on a step with each call."""

    def log_metrics(self, metrics, step=None):
        super().log_metrics({**metrics, "thousands": step / 1000}, step)


@caught_by("LOG-02")
class GoesForward(CSVLogger):
    """Refuses a step that it has had."""

    last = -1

    def log_metrics(self, metrics, step=None):
        if step is not None:
            assert step > self.last, f"step {step} after {self.last}"
            self.last = step
        super().log_metrics(metrics, step)


@caught_by("LOG-03")
class WritesJSON(CSVLogger):
    """Takes what JSON takes."""

    def log_hyperparams(self, params, *args, **kwargs):
        json.dumps(params if isinstance(params, dict) else vars(params), sort_keys=True)
        super().log_hyperparams(params)


@caught_by("LOG-03")
class TakesDicts(CSVLogger):
    """Counts on a dict."""

    def log_hyperparams(self, params, *args, **kwargs):
        super().log_hyperparams({str(name): str(value) for name, value in params.items()})


@caught_by("LOG-04")
class ClosesForGood(CSVLogger):
    """Is over with the first call of the Trainer."""

    is_closed = False

    def log_metrics(self, metrics, step=None):
        if self.is_closed:
            raise RuntimeError("logged after finalize")
        super().log_metrics(metrics, step)

    def finalize(self, status):
        super().finalize(status)
        self.is_closed = True


@caught_by("LOG-04")
class BeginsAnother(CSVLogger):
    """Makes a run of each call of the Trainer."""

    def finalize(self, status):
        super().finalize(status)
        if os.path.isdir(self.log_dir):
            self._version = None


@caught_by("LOG-05")
class KeepsItsFile(CSVLogger):
    """Has an open file, which doesn't travel."""

    file = None

    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        os.makedirs(self.log_dir, exist_ok=True)
        self.file = open(os.path.join(self.log_dir, "copy"), "a")  # noqa: SIM115


@caught_by("LOG-05")
class TravelsAsAnother(CSVLogger):
    """Leaves its run's number behind."""

    def __getstate__(self):
        return {**super().__getstate__(), "_version": None}


@caught_by("LOG-06")
class DrawsItsIds(CSVLogger):
    """Names each row by random letters."""

    def log_metrics(self, metrics, step=None):
        super().log_metrics({**metrics, "id": random.random()}, step)


@caught_by("LOG-06")
class MovesThere(CSVLogger):
    """Makes its folder that of the process."""

    def save(self):
        super().save()
        os.chdir(self.save_dir)


@caught_by("LOG-07")
class HearsOfNoCheckpoint(CSVLogger):
    """Expects the path, not the callback."""

    def after_save_checkpoint(self, checkpoint_callback):
        os.fspath(checkpoint_callback)


@caught_by("LOG-07", says="nothing requires grad")
class TurnsOffGradients(CSVLogger):
    """Needs no gradients to log, and leaves it at that."""

    def log_metrics(self, metrics, step=None):
        torch.set_grad_enabled(False)
        super().log_metrics(metrics, step)


@caught_by("LOG-02", read=read_csv, says="read() returns it not")
class DropsNames(CSVLogger):
    """Drops each metric with a slash."""

    def log_metrics(self, metrics, step=None):
        super().log_metrics({name: value for name, value in metrics.items() if "/" not in name}, step)


@caught_by("LOG-03", read=read_csv, says="read() returns it not")
class DropsHyperparameters(CSVLogger):
    """Drops every hyperparameter."""

    def log_hyperparams(self, params, *args, **kwargs):
        pass


@caught_by("LOG-05", read=read_csv, says="read() returns it not")
class CopyOverwrites(CSVLogger):
    """Its unpickled copy deletes what the run has written."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.path.exists(self.metrics_path):
            os.unlink(self.metrics_path)


@caught_by("LOG-08", says="the files that rank 1 wrote")
class LeavesAFolderPerRank(CSVLogger):
    """Notes its rank where its folder is read."""

    @property
    def log_dir(self):
        folder = super().log_dir
        if os.environ.get("RANK", "0") != "0":
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, "rank"), "w") as file:
                file.write(os.environ["RANK"])
        return folder
