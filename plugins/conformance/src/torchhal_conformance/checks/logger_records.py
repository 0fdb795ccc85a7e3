"""LOG: a logger records the metrics and hyperparameters that it is given, under any name, or says that it can't."""

from __future__ import annotations

import argparse
import math

import torch

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, NotGiven, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._logger_rows import (
    collect_messages,
    is_recorded,
    make,
    read_rows,
    recorded,
    require_recorded,
)
from torchhal_conformance.checks.trainer import folder_arguments

METRICS = {
    "loss": 0.5, "val/loss": 1e-30, "lr-Adam/pg1": -3.0, "acc_epoch/dataloader_idx_0": 1.0, "a b=c(d)[e]:f%": 2.0,
    "größe": 1e30, "nan": math.nan, "inf": math.inf, "epoch": 4,
}  # fmt: skip
"""Names as models, callbacks and people give them."""


class Unprintable:
    """A hyperparameter of a class that no format knows."""


@check("LOG-02", since="0.2", after=("LOG-01",))
def metrics(context: CheckContext) -> None:
    """Metrics of any name are recorded, with a step and without one, at steps that repeat or go back.

    What isn't finite is recorded too, or a warning says that it isn't. The mapping stays as it was given, and may be
    filled anew for the next call.

    Why: names come from users, a diverged run logs nan, a resumed one logs steps that it has logged before, and the
    next logger gets the same mapping.
    Fix: replace the characters that the service refuses by what no other name has; copy the mapping; drop or convert
    what the service can't hold, and say so once.
    """
    logger = make(context)
    calls: list[tuple[dict[str, float], int | None]] = [
        (METRICS, 0), *(({"loss": float(step)}, step) for step in (1, 1, 5, 2)), ({"score": 1.0}, None), ({}, 6),
        ({"late": 3.0, **METRICS}, 7), ({"loss/val": 0.25, "loss_val": 0.75}, 8), ({"of the epoch": 0.625}, 8),
    ]  # fmt: skip
    given: dict[str, float] = {}
    with collect_messages() as messages:
        for values, step in calls:
            given.clear()
            given.update(values)
            logger.log_metrics(given, step)
            same("the mapping that log_metrics was given", given, values)
        logger.save()
        logger.finalize("success")
    logged = [(step, value) for values, step in calls for value in values.values()]
    require_recorded(context, logger, logged)
    found = recorded(read_rows(context, logger))
    for text, is_kind in (("nan", math.isnan), ("inf", math.isinf)):
        there = any(is_kind(value) for _, value in found)
        require(there or messages, f"{text} was logged, read() returns it not, and no warning said so")


@check("LOG-03", since="0.2", after=("LOG-01",))
def hyperparameters(context: CheckContext) -> None:
    """Hyperparameters of any kind are recorded, and stay as they were given.

    They are nested, in a namespace, zero or False, objects, none at all, and come twice.

    Why: save_hyperparameters() hands over whatever a constructor was called with, and the model goes on with it.
    Fix: flatten a copy, and take the text of what the service can't hold.
    """
    logger = make(context)
    for params in (
        {"lr": 0.1, "layers": [1, 2], "net": {"act": "relu", "depth": None}, "object": Unprintable(), 3: "three"},
        argparse.Namespace(lr=0.2, size=torch.Size([2, 3]), dtype=torch.float16, opt={"betas": [0.9, 0.99]}),
        {"dropout": 0.0, "bias": False},
        {},
        {"lr": 0.3},
    ):
        before = repr(params)
        logger.log_hyperparams(params)
        same("the hyperparameters that it was given", repr(params), before)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    text = " ".join(str(row["params"]) for row in read_rows(context, logger) if "params" in row)
    for value in ("relu", "three", "torch.float16", "dropout", "bias"):
        require(value in text, f"the hyperparameter {value!r} was logged, and read() returns it not")
    # the service decides whether the first or the last of a name stays
    require(any(lr in text for lr in ("0.1", "0.2", "0.3")), "the hyperparameter lr was logged, and read() has none")


@check("LOG-10", since="0.2", after=("LOG-02",))
def says_what_it_cannot_write(context: CheckContext) -> None:
    """A logger whose folder can't be created raises an error or warns, at the latest when the call ends.

    Why: a run that goes on without a word has no record when it is done.
    Fix: let the OSError through: the Trainer warns once and goes on.
    """
    blocked = context.folder / "a file"
    blocked.touch()
    given = folder_arguments(context.component, str(blocked))
    if not given:
        raise NotApplicable("its folder can't be chosen: it takes no save_dir, or one was given")
    with collect_messages() as messages:
        try:
            logger = context.create(**given)
            logger.log_metrics({"loss": 0.5}, 0)
            logger.save()
            logger.finalize("success")
        except Exception:
            return
    if messages:
        return
    try:  # at a service
        found = recorded(read_rows(context, logger))
    except NotGiven:
        raise
    except Exception:
        found = []
    require(is_recorded(found, 0, 0.5), "its folder can't be created, nothing is recorded, and it raised no error")


@check("LOG-11", since="0.2", after=("LOG-02",))
def two_at_once(context: CheckContext) -> None:
    """Of two loggers in one process, used in turn, each has its own rows.

    Why: a Trainer may have two, and a search makes one for each trial.
    Fix: keep what is buffered in the object, not in its class or module.
    """
    if not folder_arguments(context.component, ""):
        raise NotApplicable("its folder can't be chosen, so that two may be of one run")
    loggers = [make(context, "one"), make(context, "other")]
    logged: list[list[tuple[int | None, float]]] = [[], []]
    for step in range(2):
        for index, logger in enumerate(loggers):
            value = 10.0 * index + step + 0.5
            logger.log_metrics({"loss": value}, step)
            logged[index].append((step, value))
    for logger in reversed(loggers):
        logger.save()
    for logger in loggers:
        logger.finalize("success")
    for index, logger in enumerate(loggers):
        require_recorded(context, logger, logged[index])
        found = recorded(read_rows(context, logger))
        foreign = [value for step, value in logged[1 - index] if is_recorded(found, step, value)]
        require(not foreign, f"{foreign} were logged by the other logger, and read() returns them of this one too")
