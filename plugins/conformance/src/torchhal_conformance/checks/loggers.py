"""LOG: a logger records what it is given, under any name, in any process that it comes to."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import torch

from torchhal import rng
from torchhal.trainer.loggers import Logger
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks.trainer import BATCH, ThreeLayers, data

METRICS = {
    "loss": 0.5, "val/loss": 1e-30, "lr-Adam/pg1": -3.0, "acc_epoch/dataloader_idx_0": 1.0, "a b=c(d)[e]:f%": 2.0,
    "größe": 1e30, "nan": math.nan, "inf": math.inf,
}  # fmt: skip
"""Names as models, callbacks and people give them."""


class Unprintable:
    """A hyperparameter of a class that no format knows."""


def make(context: CheckContext) -> Logger:
    """Return a logger that writes below the check's folder, where its constructor takes one."""
    takes = "save_dir" in inspect.signature(context.component.cls).parameters
    given = {"save_dir": str(context.folder)} if takes and "save_dir" not in context.component.arguments else {}
    made: Logger = context.create(**given)
    return made


@check("LOG-01", since="0.2", after=("GEN-11",))
def starts_with_the_first_write(context: CheckContext) -> None:
    """Making a logger, and reading its name, version and folders, writes no file and starts no thread.

    Why: a Trainer that is made and never fits, or is copied to eight ranks, would leave empty runs behind.
    Fix: open files, clients and runs in the first log_metrics or log_hyperparams.
    """
    threads, before = threading.active_count(), _files(context.folder)
    logger = make(context)
    for name in ("name", "version", "save_dir", "root_dir", "log_dir"):
        getattr(logger, name)
    same("the files after a logger was made", _files(context.folder), before)
    require(threading.active_count() <= threads, "making it started a thread")


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@check("LOG-02", since="0.2", after=("LOG-01",))
def metrics(context: CheckContext) -> None:
    """Metrics of any name, finite or not, are taken, with a step and without one, at steps that repeat or go back.

    Why: names come from users, a diverged run logs nan, and a resumed one logs steps that it has logged before.
    Fix: replace the characters that the service refuses; drop or convert what it can't hold, and say so once.
    """
    logger = make(context)
    logger.log_metrics(METRICS, 0)
    for step in (1, 1, 5, 2):
        logger.log_metrics({"loss": float(step)}, step)
    logger.log_metrics({"score": 1.0})
    logger.log_metrics({}, 6)
    logger.log_metrics({"late": 3.0, **METRICS}, 7)
    logger.save()
    logger.finalize("success")


@check("LOG-03", since="0.2", after=("LOG-01",))
def hyperparameters(context: CheckContext) -> None:
    """Hyperparameters of any kind are taken: nested, in a namespace, objects, none at all, and twice.

    Why: save_hyperparameters() hands over whatever a constructor was called with.
    Fix: flatten, and take the text of what the service can't hold.
    """
    logger = make(context)
    for params in (
        {"lr": 0.1, "layers": [1, 2], "net": {"act": "relu", "depth": None}, "object": Unprintable(), 3: "three"},
        argparse.Namespace(lr=0.2, size=torch.Size([2, 3]), dtype=torch.float16),
        {},
        {"lr": 0.3},
    ):
        logger.log_hyperparams(params)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")


@check("LOG-04", since="0.2", after=("LOG-02",))
def goes_on_after_an_end(context: CheckContext) -> None:
    """After finalize, with any status and as often as it comes, a logger logs on into the same run.

    Why: a Trainer fits, tests and fits again, and each call ends in finalize.
    Fix: flush in finalize; close what can be opened again.
    """
    logger = make(context)
    logger.finalize("success")  # before anything was logged
    version = logger.version
    for step, status in enumerate(("success", "failed", "interrupted")):
        logger.log_metrics({"loss": 1.0}, step)
        logger.finalize(status)
        logger.finalize(status)
    logger.log_metrics({"loss": 1.0}, 9)
    logger.save()
    same("the version at the end", logger.version, version)


@check("LOG-05", since="0.2", after=("LOG-02", "GEN-19"))
def pickles_in_use(context: CheckContext) -> None:
    """A logger that has logged pickles, and its copy logs into the same run.

    Why: launchers take it into their processes by pickle, of a second fit too.
    Fix: drop clients, threads and files in __getstate__, and open them again when they are needed.
    """
    logger = make(context)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    try:
        copied = pickle.loads(pickle.dumps(logger))
    except Exception as error:
        raise CheckFailed(f"a logger in use doesn't survive pickle ({type(error).__name__}: {error})") from error
    for name in ("name", "version", "log_dir"):
        same(f"{name} of the copy", getattr(copied, name), getattr(logger, name))
    copied.log_metrics({"loss": 2.0}, 1)
    copied.finalize("success")
    logger.log_metrics({"loss": 3.0}, 2)
    logger.finalize("success")


@check("LOG-06", since="0.2", after=("LOG-02",))
def no_side_effects(context: CheckContext) -> None:
    """Logging draws no random numbers, and changes neither the folder of the process nor torch's defaults.

    Why: a run with another logger would be another run.
    Fix: use a generator of your own for names and ids.
    """
    logger = make(context)
    before = rng.collect_host()
    folder, dtype, threads = os.getcwd(), torch.get_default_dtype(), torch.get_num_threads()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics(METRICS, 0)
    logger.save()
    logger.finalize("success")
    drawn = [name for name, state in rng.collect_host().items() if not _same_state(state, before[name])]
    require(not drawn, f"logging drew random numbers ({', '.join(drawn)})")
    same("the folder of the process", os.getcwd(), folder)
    same("torch's default dtype", torch.get_default_dtype(), dtype)
    same("torch's threads", torch.get_num_threads(), threads)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same_state, one, other))
    if hasattr(one, "tolist"):  # an array
        return bool(one.tolist() == other.tolist())
    return bool(one == other)


@check("LOG-07", since="0.2", needs=["device"], after=("LOG-02", "LOG-03"))
def in_a_trainer(context: CheckContext) -> None:
    """A fit with checkpoints, a validation and a test log through it, and the weights are those without it.

    Why: hooks such as after_save_checkpoint are called by a Trainer alone.
    Fix: the checks before this one; after_save_checkpoint gets the ModelCheckpoint.
    """
    from torchhal import Trainer

    calls: list[str] = []
    weights = []
    for logger in (False, make(context)):
        if not isinstance(logger, bool):
            logger.on_error = "raise"  # the Trainer goes on without a logger that fails
            _count(logger, "log_metrics", calls)
        model = ThreeLayers()
        trainer = Trainer(
            accelerator=context.component.accelerator, devices=1, max_epochs=2, logger=logger, log_every_n_steps=1,
            default_root_dir=str(context.folder), enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        batches = torch.utils.data.DataLoader(data(), batch_size=BATCH)
        trainer.fit(model, batches, batches)
        trainer.test(model, batches, verbose=False)
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    require(len(calls) >= 8, f"log_metrics was called {len(calls)} times in eight steps: its override isn't used")
    require(all(map(torch.equal, *weights)), "the weights after a fit are others than without the logger")


def _count(logger: Any, name: str, calls: list[str]) -> None:
    own = getattr(logger, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return own(*args, **kwargs)

    setattr(logger, name, counting)
