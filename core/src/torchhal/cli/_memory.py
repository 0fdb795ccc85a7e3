"""``torchhal explain --model``: how many bytes the model needs on each rank."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from torchhal._text_table import format_table
from torchhal.cli._model_options import MODEL_ARGS_HELP, find_model, parse_model_args
from torchhal.cli._step_memory import find_batch, parse_size, step_lines, step_row
from torchhal.errors import ConfigurationError, ModelError, TorchhalError, UnsupportedCombinationError

if TYPE_CHECKING:
    from torchhal.composition import Composition
    from torchhal.memory_estimate import ModelMemory
    from torchhal.resolve import Plan, Request
    from torchhal.trainer import Trainer
    from torchhal.trainer.planning._measured_steps import MeasuredSteps

EPOCHS: Final = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=None,
        metavar="MODULE:CLASS",
        help="also estimate its memory on each rank; a function that returns a model will do, too",
    )
    parser.add_argument("--model-args", default=None, metavar="JSON", help=MODEL_ARGS_HELP)
    parser.add_argument(
        "--batch",
        default=None,
        metavar="MODULE:NAME",
        help="a batch of one rank, a loader, or a function that returns either: adds activations, phase by phase",
    )
    parser.add_argument(
        "--memory", default=None, metavar="SIZE", help="of each device, such as 80GiB: adds which strategies fit"
    )


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for options that need another one, and for a size that is none."""
    for option, given, needed in (
        ("--model-args", arguments.model_args, "--model"),
        ("--batch", arguments.batch, "--model"),
        ("--memory", arguments.memory, "--batch"),
    ):
        if given is not None and getattr(arguments, needed[2:]) is None:
            what = {
                "--model-args": "'--model-args' are the arguments of a '--model', which is missing",
                "--batch": "'--batch' is what a '--model' trains on, which is missing",
                "--memory": "'--memory' is compared with what a step takes, which needs a '--batch'",
            }[option]
            raise ConfigurationError(what)
    if arguments.memory is not None:
        parse_size(arguments.memory)


def estimate(arguments: argparse.Namespace, request: Request, plan: Plan) -> dict[str, Any]:
    """Return the bytes for the strategy that was requested, or for every one that can be used, as plain data.

    Args:
        arguments: of the command line.
        request: made of them.
        plan: what it was resolved to.
    """
    from torchhal.memory_estimate import bytes_of
    from torchhal.trainer.planning._choice import MARGIN

    memory = _measure(arguments, request, plan)
    steps = None if arguments.batch is None else _steps(arguments, request, plan, memory)
    limit = None if arguments.memory is None else parse_size(arguments.memory)
    strategy = plan.strategy
    composition = _composition(plan, strategy.value, plan.world_size)
    auto: dict[str, Any] = {}
    if not request.is_auto_strategy:
        rows = [_row(strategy.alias, strategy.value, memory, composition, steps, limit)]
    else:
        rows = list(_every(memory, plan, steps, limit))
        if steps is not None and limit is not None:
            rows, auto = _with_candidates(rows, request, plan, steps, limit)
    found: dict[str, Any] = {
        "model": arguments.model,
        "world_size": plan.world_size,
        "parameters": sum(p.parameter.numel() for p in memory.parameters),
        "bytes": sum(bytes_of(p.parameter) for p in memory.parameters),
        "strategies": rows,
    }
    if steps is not None:
        found |= {"batch": arguments.batch, "batch_bytes": steps.batch_bytes}
    if limit is not None:
        found |= {"limit": limit, "margin": MARGIN, **auto}
    return found


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the estimates as text: bytes per rank."""
    if "batch" in found:
        yield from step_lines(found)
        return
    yield f"{found['model']}: {found['parameters']} parameters, {found['bytes']} bytes; on each of " + (
        f"{found['world_size']} rank(s), without activations, for which a '--batch' is needed:"
    )
    columns = ("parameters", "buffers", "gradients", "optimizer", "total", "peak")
    table: list[tuple[str, ...]] = [("strategy", *columns, "")]
    for row in found["strategies"]:
        if "reason" in row:
            table.append((row["strategy"], f"not possible: {row['reason']}"))
        else:
            note = f"({row['note']})" if row["note"] else ""
            table.append((row["strategy"], *(str(row[name]) for name in columns), note))
    yield from format_table(table, align="<>>>>>><")


def _measure(arguments: argparse.Namespace, request: Request, plan: Plan) -> ModelMemory:
    from torchhal.memory_estimate import build_model, model_memory
    from torchhal.trainer._configure_optimizers import configure_optimizers
    from torchhal.trainer.planning._trained_model import BATCHES

    given = parse_model_args(arguments.model_args)
    trainer = _stand_in(request)
    module = plan.precision.value.convert_module(build_model(find_model(arguments.model), given, trainer=trainer))
    trainer.module = module
    if not hasattr(module, "configure_optimizers"):
        raise ModelError(
            f"{type(module).__name__} has no configure_optimizers(), so what its optimizer needs is not known: define "
            "it, or estimate a torchhal.Module around it"
        )
    try:
        optimizers, _ = configure_optimizers(module)
    except TorchhalError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__}.configure_optimizers can't be called without a Trainer that fits it "
            f"({type(error).__name__}: {error}). A torchhal.Module finds one with {EPOCHS} epochs of {BATCHES} batches "
            "in self.trainer here, and no data in it"
        ) from error
    return model_memory(module, optimizers)


def _stand_in(request: Request) -> Trainer:
    """Return a Trainer for ``self.trainer`` of a model that is not fitted, with the requested options.

    Its batches are only counted.
    """
    from torchhal.trainer import Trainer
    from torchhal.trainer.planning._trained_model import BATCHES, CountedBatches

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Plan has given the notes
        trainer = Trainer(
            **vars(request),
            max_epochs=EPOCHS,
            max_steps=EPOCHS * BATCHES,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    trainer.state.fn = "fit"
    counted: Any = CountedBatches()
    trainer._run.progress.data = counted
    return trainer


def _steps(arguments: argparse.Namespace, request: Request, plan: Plan, memory: ModelMemory) -> MeasuredSteps:
    def make() -> tuple[Any, Any]:
        """Return the model with values, and its optimizers."""
        from torchhal.memory_estimate import build_model
        from torchhal.trainer._configure_optimizers import configure_optimizers

        given = parse_model_args(arguments.model_args)
        trainer = _stand_in(request)
        built = build_model(find_model(arguments.model), given, trainer=trainer, device="cpu")
        trainer.module = module = plan.precision.value.convert_module(built)
        return module, configure_optimizers(module)[0]

    from torchhal.trainer.planning._measured_steps import MeasuredSteps

    return MeasuredSteps(
        memory,
        find_batch(arguments.batch),
        accelerator=plan.accelerator.value,
        device=plan.devices[0],
        precision=plan.precision.value,
        make=make,
    )


def _with_candidates(
    rows: list[dict[str, Any]], request: Request, plan: Plan, steps: MeasuredSteps, limit: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows with those of ``strategy="auto"`` first, in their order, and what it would take."""
    from torchhal.resolve._options import strategy_options
    from torchhal.trainer.planning._choice import candidates, choose
    from torchhal.trainer.planning._measured_steps import Measured

    found = list(candidates(strategy_options(plan, request), steps, plan.world_size))
    first: list[dict[str, Any]] = []
    for candidacy in found:
        if candidacy.phases is None or candidacy.step is None:
            first.append({"strategy": candidacy.name, "reason": candidacy.reason})
            continue
        strategy = candidacy.strategy
        estimate = strategy.memory_per_rank(steps.memory, plan.world_size).to_dict()
        measured = Measured(candidacy.phases, candidacy.step)
        first.append({"strategy": candidacy.name, **estimate, **step_row(measured, limit)})
    aliases = {row["strategy"] for row in rows}
    choice = choose(found, limit)
    auto = {"strategy": choice.chosen.name, "fits": choice.fits, "reason": choice.reason()}
    possible = [row for row in first if "reason" not in row]
    refused = [row for row in first if "reason" in row and row["strategy"] not in aliases]
    listed = {row["strategy"] for row in possible}
    others = [row for row in rows if row["strategy"] not in listed]
    ends = [row for row in others if "reason" in row]
    return [*possible, *(row for row in others if "reason" not in row), *refused, *ends], {"auto": auto}


def _every(memory: ModelMemory, plan: Plan, steps: MeasuredSteps | None, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield one row for each strategy of this hardware, those that are not possible last.

    Strategies that differ only in how processes start share the row of the shortest name.
    """
    from torchhal import registry
    from torchhal.registry._discovery import describe
    from torchhal.resolve._compatibility import check_accelerator
    from torchhal.resolve._plan import ResolvedComponent

    alike: dict[Any, dict[str, Any]] = {}
    impossible: list[dict[str, Any]] = []
    for entry in registry.entries("strategy"):
        if not entry.availability():
            continue
        alias = entry.component.alias
        try:
            strategy = entry.create()
        except Exception as error:  # one of many in a listing, so its error is shown in its row
            reason = str(error) if isinstance(error, TorchhalError) else describe(error)
            impossible.append({"strategy": alias, "reason": " ".join(reason.split())})
            continue
        strategy.alias = strategy.alias or alias  # by which its refusals name it
        try:
            check_accelerator(plan.accelerator, ResolvedComponent("strategy", alias, strategy, ""))
        except UnsupportedCombinationError:
            continue
        processes = strategy.num_local_processes(len(plan.device_indices)) * (plan.num_nodes or 1)
        world_size = processes if strategy.multi_device else 1
        row = _row(alias, strategy, memory, _composition(plan, strategy, world_size), steps, limit)
        if "reason" in row:
            impossible.append(row)
            continue
        options = {name: value for name, value in entry.component.defaults.items() if name != "start_method"}
        numbers = repr(list(row.values())[1:])
        first = alike.setdefault((entry.component.target, repr(sorted(options.items())), numbers), row)
        if len(alias) < len(first["strategy"]):
            first["strategy"] = alias
    yield from alike.values()
    yield from impossible


def _composition(plan: Plan, strategy: Any, world_size: int) -> Composition:
    from torchhal.composition import Composition

    return Composition(
        accelerator=plan.accelerator.value,
        precision=plan.precision.value,
        checkpoint_io=plan.checkpoint_io.value,
        cluster_environment=None if plan.cluster_environment is None else plan.cluster_environment.value,
        strategy=strategy,
        devices=plan.devices,
        num_nodes=plan.num_nodes,
        world_size=world_size,
    )


def _row(
    alias: str,
    strategy: Any,
    memory: ModelMemory,
    composition: Composition,
    steps: MeasuredSteps | None,
    limit: int | None,
) -> dict[str, Any]:
    from torchhal.resolve._refusals import check_fit

    try:
        check_fit("strategy", strategy, composition)
        row = {"strategy": alias, **strategy.memory_per_rank(memory, composition.world_size).to_dict()}
        return row if steps is None else row | step_row(steps.measure(strategy, composition.world_size), limit)
    except TorchhalError as error:
        return {"strategy": alias, "reason": " ".join(str(error).split())}
