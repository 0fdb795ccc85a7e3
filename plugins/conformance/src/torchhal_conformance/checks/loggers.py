"""LOG: a logger works in every call of a Trainer, in any process that it comes to, and changes nothing else."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from torchhal import rng
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._logger_rows import make, require_recorded
from torchhal_conformance.checks.logger_records import METRICS
from torchhal_conformance.checks.trainer import BATCH, ThreeLayers, data, folder_arguments, loader, trainer

FOLDERS = ("save_dir", "root_dir", "log_dir")


@check("LOG-01", since="0.2", after=("GEN-11",))
def starts_with_the_first_write(context: CheckContext) -> None:
    """Making a logger, and reading its name, version and folders, writes nothing and starts no thread.

    Why: a Trainer that is made and never fits, or is copied to eight ranks, would leave empty runs behind.
    Fix: create folders, and open files, clients and runs, in the first log_metrics or log_hyperparams.
    """
    threads, before = threading.active_count(), _files(context.folder)
    logger = make(context)
    for name in ("name", "version", *FOLDERS):
        getattr(logger, name)
    same("the files and folders after a logger was made", _files(context.folder), before)
    require(threading.active_count() <= threads, "making it started a thread")


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@check("LOG-04", since="0.2", after=("LOG-02",))
def goes_on_after_an_end(context: CheckContext) -> None:
    """After finalize, with any status and as often as it comes, a logger logs on into the same run, and loses nothing.

    Why: a Trainer fits, tests and fits again, and each call ends in finalize; what led to a failure is wanted most.
    Fix: flush in finalize, whatever the status; close what can be opened again.
    """
    logger = make(context)
    logger.finalize("success")  # before anything was logged
    version = logger.version
    logged: list[tuple[int | None, float]] = []
    for step, status in enumerate(("success", "failed", "interrupted")):
        logger.log_metrics({"loss": step + 0.5}, step)
        logged.append((step, step + 0.5))
        logger.finalize(status)
        logger.finalize(status)
        if context.component.read is not None:
            require_recorded(context, logger, logged)
    logger.log_metrics({"loss": 9.5}, 9)
    logger.save()
    logger.finalize("success")
    same("the version at the end", logger.version, version)
    require_recorded(context, logger, [*logged, (9, 9.5)])


@check("LOG-05", since="0.2", after=("LOG-02", "GEN-19"))
def pickles_in_use(context: CheckContext) -> None:
    """A logger that has logged pickles, and its copy logs into the same run, of which nothing is lost.

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
    if context.component.read is not None:
        require_recorded(context, copied, [(0, 1.0), (1, 2.0)])
    logger.log_metrics({"loss": 3.0}, 2)
    logger.finalize("success")
    require_recorded(context, logger, [(0, 1.0), (1, 2.0), (2, 3.0)])


@check("LOG-06", since="0.2", after=("LOG-02",))
def no_side_effects(context: CheckContext) -> None:
    """Making a logger and logging change nothing else in the process.

    They draw no random numbers, and leave its folder, torch's defaults and, after the first call has ended, the
    streams of the console.

    Why: a run with another logger would be another run.
    Fix: use a generator of your own for names and ids; wrap the console once, and no longer than your run is open.
    """
    before = rng.collect_host()
    folder, dtype, threads = os.getcwd(), torch.get_default_dtype(), torch.get_num_threads()
    streams = sys.stdout, sys.stderr
    logger = make(context)
    try:
        _one_call(logger)
        states = rng.collect_host()
        after_first = sys.stdout, sys.stderr  # some services wrap them as long as their run is open
        _one_call(logger)
        is_wrapped = any(one is not other for one, other in zip(after_first, (sys.stdout, sys.stderr), strict=True))
    finally:
        sys.stdout, sys.stderr = streams
    generators = rng.drawn_between(before, states)
    require(not generators, f"logging drew random numbers ({', '.join(generators)})")
    same("the folder of the process", os.getcwd(), folder)
    same("torch's default dtype", torch.get_default_dtype(), dtype)
    same("torch's threads", torch.get_num_threads(), threads)
    require(not is_wrapped, "a second call has replaced sys.stdout or sys.stderr again")


def _one_call(logger: Any) -> None:
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics(dict(METRICS), 0)
    logger.save()
    logger.finalize("success")


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


@check("LOG-08", since="0.2", needs=["device"], world_sizes=(2,), timeout=60, after=("LOG-07",))
def on_two_ranks(rank: RankContext) -> None:
    """In a fit on two ranks only rank 0 writes files and folders, and both have the same folders.

    Why: two writers of one run overwrite each other's rows, and each rank's own run hides the one that counts.
    Fix: write nothing in a property or the constructor, which every rank calls; choose the run by what is there, and
    not by the time, the process or at random.
    """
    folder = Path(rank.folder) / f"rank_{rank.rank}"
    folder.mkdir()
    given = folder_arguments(rank.component, str(folder))
    logger = rank.component.create(**given)
    folders = [getattr(logger, name) for name in FOLDERS]
    first, second = rank.gather([one and os.path.relpath(one, folder) for one in folders])
    same("the folders on rank 1", second, first)
    trainer(rank, logger=logger, max_epochs=1, log_every_n_steps=1).fit(ThreeLayers(), loader(rank))
    rank.gather("done")
    if rank.rank and given:
        same("the files that rank 1 wrote", _files(folder), [])


@check("LOG-09", since="0.2", after=("LOG-01",))
def properties(context: CheckContext) -> None:
    """Its folders are text or None, on every rank the same, its version is a number or text, and on_error known.

    Why: a Trainer reads them on every rank, joins the folders to paths, and puts them into checkpoints.
    Fix: os.fspath() in the property, and no question there for the rank; on_error "warn" or "raise".
    """
    logger: Any = make(context)
    version = logger.version
    is_known = version is None or (isinstance(version, int | str) and not isinstance(version, bool))
    require(is_known, f"version must be an int, a str or None (got {version!r})")
    own = {name: getattr(logger, name) for name in ("name", *FOLDERS)}
    for name, value in own.items():
        require(value is None or isinstance(value, str), f"{name} must be a str or None (got {value!r})")
    require(logger.on_error in ("warn", "raise"), f"on_error must be 'warn' or 'raise' (got {logger.on_error!r})")
    with patch.dict(os.environ, RANK="1"):
        for name in FOLDERS:
            same(f"{name} where RANK is 1", getattr(logger, name), own[name])


@check("LOG-12", since="0.2", after=("LOG-02",))
def texts_and_pictures(context: CheckContext) -> None:
    """Texts, images and figures are taken or left out, without an error, and stay as they were given.

    Why: a callback logs them to every logger of a Trainer, one after the other.
    Fix: inherit the method that does nothing; convert a copy of an image, and close no figure.
    """
    logger = make(context)
    image = torch.rand(3, 8, 8, generator=context.generator())
    before = image.clone()
    logger.log_text("note", "two *words*", 1)
    logger.log_text("note", "without a step")
    for step, images in enumerate((image, image[0], image[:1].numpy(), [image, image], (image * 255).byte())):
        logger.log_image("samples", images, step)
        same("the image that log_image was given", image, before)
    if find_spec("matplotlib") is not None:
        from matplotlib import pyplot

        figure = pyplot.figure()
        try:
            logger.log_figure("curve", figure, 1)
            require(pyplot.fignum_exists(figure.number), "log_figure has closed the figure")
        finally:
            pyplot.close(figure)
    logger.finalize("success")
