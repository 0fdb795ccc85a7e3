"""ENV-18, 19, 53 and 54: a cluster environment in processes that its launcher has really started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import ConfigurationError
from torchhal.precision import SinglePrecision
from torchhal.strategies import DDPStrategy
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import MissingInput, MissingRequirement, NotApplicable, Skipped, check
from torchhal_conformance._cluster_world import known_numbers, numbers
from torchhal_conformance._component_under_test import NO_LAUNCHER, ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._subprocesses import START, Job, call


def _launcher(component: ComponentUnderTest) -> Sequence[str]:
    known = component.own_launcher
    if known is None:
        raise MissingRequirement(NO_LAUNCHER)
    return known


@check("ENV-18", features=["launches"], needs=["posix"])
def real_launch(context: CheckContext) -> None:
    """Two processes that its launcher really starts are ranks 0 and 1, once each, and find each other.

    The launcher is the command ``launcher=`` of the suite, such as ("srun", "-n", "2"); torchrun's is known.

    Why: the recorded variables were those of another version of the launcher.
    Fix: print os.environ in a job of two processes, and give that as ``tables``.
    """
    _run_launcher(context, _count_ranks)
    found = sorted(path.read_text() for path in context.folder.glob("rank-*"))
    same("rank, local rank, world and sum in each process", found, ["0 0 2 1.0", "1 1 2 1.0"])


@check("ENV-19", features=["elastic"], needs=["posix"], after=("ENV-18",))
def restarted(context: CheckContext) -> None:
    """When its launcher starts the processes again after a failure, they meet anew, with the ranks they have then.

    Why: the new processes went to the address of the dead ones and waited there.
    Fix: read rank, address and port when asked for; keep nothing in a file or in a variable of your own.
    """
    _run_launcher(context, _fail_once)
    require((context.folder / "failed").exists(), "no process failed, so none was started again")
    found = sorted(path.read_text() for path in context.folder.glob("rank-*"))
    same("rank, local rank, world and sum in each process of the second start", found, ["0 0 2 1.0", "1 1 2 1.0"])


@check("ENV-53", needs=["posix"], since="0.2")
def live_runtime(context: CheckContext) -> None:
    """Numbers that a runtime gives, and no variable, are right in two processes that its launcher really starts.

    detect() is True there, creates_processes_externally too; each number is an int, and the ranks are 0 and 1, once
    each; a copy by pickle has them or needs join(); reading them writes nothing to os.environ; validate_settings
    accepts the job as it is and refuses another one. This takes the place of the checks that need the launcher's
    variables.

    Why: a runtime that was asked before it had started took every process for rank 0 of 1.
    Fix: connect to the runtime in join(), or when a number is read; give the suite the launcher.
    """
    if "live_runtime" not in context.component.declared:
        raise NotApplicable(
            "feature 'live_runtime' is not declared: the checks with the launcher's variables are for it"
        )
    if context.component.own_launcher is None:
        raise MissingInput("how to start two processes is not known: give --launcher 'COMMAND', or launcher=(...)")
    _check_processes(context)


@check("ENV-54", needs=["posix"], since="0.2", after=("ENV-18",))
def started_processes(context: CheckContext) -> None:
    """In two processes that its launcher really starts an environment is found by a variable that announces it.

    detect() is True where creates_processes_externally is; each number is an int, and reading writes nothing to
    os.environ.

    Why: a launcher of torchhal's that passed the ranks on and not the variable left its workers to another environment.
    Fix: set a variable that torchhal.detect declares in each process that you start.
    """
    if "launches" not in context.component.declared:
        raise Skipped("feature 'launches' is not declared")  # as of ENV-18, which declares that it needs it
    _check_processes(context)
    plugin = context.component.plugin
    mine = [entry for entry in plugin.components if entry.component.alias == context.component.alias] if plugin else []
    names = [name for entry in mine if entry.kind == "cluster_environment" for name in entry.variables]
    for survey in _surveys(context):
        found = set(names) & set(survey["variables"])
        require(found or not names, f"a process has none of the variables that announce it: {', '.join(names)}")


def _check_processes(context: CheckContext) -> None:
    _run_launcher(context, _survey_process)
    surveys = sorted(_surveys(context), key=lambda survey: str(survey["numbers"]["global_rank"]))
    same("the number of processes that came as far as that", len(surveys), 2)
    for rank, survey in enumerate(surveys):
        right = {"world_size": 2, "global_rank": rank, "local_rank": rank, "node_rank": 0, "local_world_size": 2}
        same(f"the numbers of process {rank}", survey["numbers"], right)
        if "live_runtime" in context.component.declared:
            of_copy = {name: value for name, value in right.items() if name in survey["copy"]}
            same(f"the numbers of a copy by pickle in process {rank}", survey["copy"], of_copy)
        external = survey["external"] is True
        if "live_runtime" in context.component.declared:
            told = f"creates_processes_externally must be True in process {rank} (got {survey['external']!r})"
            require(external, told)
        detected = survey["detected"] is True or not external  # the strategy's own process is no launcher's
        require(detected, f"detect() must be True in process {rank} (got {survey['detected']!r})")
        require(not survey["written"], f"reading wrote {', '.join(survey['written'])} to os.environ in process {rank}")
        refused = not survey["accepted"] or not external
        require(refused, f"validate_settings accepted {survey['accepted']} in a job of 2 on 1")


def _surveys(context: CheckContext) -> Iterator[dict[str, Any]]:
    for path in context.folder.glob("survey-*"):
        yield json.loads(path.read_text(encoding="utf-8"))


def _survey_process(strategy: DDPStrategy, folder: str) -> None:
    strategy.setup_environment()
    try:
        environment: Any = strategy.cluster_environment
        before = dict(os.environ)
        found: dict[str, Any] = {"numbers": numbers(environment)}
        found["detected"], found["external"] = type(environment).detect(), environment.creates_processes_externally
        copy = pickle.loads(pickle.dumps(environment))
        found["copy"] = known_numbers(copy)
        found["written"] = sorted(name for name, value in os.environ.items() if before.get(name) != value)
        environment.validate_settings(num_devices=2, num_nodes=1)
        found["accepted"] = ""
        with contextlib.suppress(ConfigurationError):
            environment.validate_settings(num_devices=3, num_nodes=1)
            found["accepted"] = "3 devices on 1 node"
        found["variables"] = sorted(os.environ)
        Path(folder, f"survey-{os.getpid()}").write_text(json.dumps(found), encoding="utf-8")
    finally:
        strategy.teardown()


def _run_launcher(context: CheckContext, function: Any) -> None:
    program = call(context.folder, _start_here, context.component, function.__name__, str(context.folder))
    ended = Job([*_launcher(context.component), *program], context.folder).finish(START)
    require(ended.code == 0, f"the job ended with {ended.code}:\n{ended.output}")
    require(not ended.left, f"{len(ended.left)} processes are left when the job has ended")


def _start_here(component: ComponentUnderTest, name: str, folder: str) -> None:
    """Run ddp on two CPU processes, with the environment under test, in a process of the launcher."""
    strategy, accelerator = DDPStrategy(), CPUAccelerator()
    strategy.configure(
        accelerator=accelerator, precision=SinglePrecision(), checkpoint_io=TorchCheckpointIO(),
        cluster_environment=component.create(), devices=accelerator.get_parallel_devices([0, 1]), num_nodes=1,
    )  # fmt: skip
    strategy.make_launcher().launch(globals()[name], strategy, folder)


def _count_ranks(strategy: DDPStrategy, folder: str) -> None:
    strategy.setup_environment()
    try:
        total = float(strategy.reduce(torch.tensor([float(strategy.global_rank)]), "sum"))
        numbers = f"{strategy.global_rank} {strategy.local_rank} {strategy.world_size} {total}"
        Path(folder, f"rank-{os.getpid()}").write_text(numbers, encoding="utf-8")
    finally:
        strategy.teardown()


def _fail_once(strategy: DDPStrategy, folder: str) -> None:
    failed = Path(folder, "failed")
    if failed.exists():
        _count_ranks(strategy, folder)
        return
    strategy.setup_environment()
    try:
        strategy.barrier("everybody has looked")
        if strategy.global_rank == 1:
            failed.touch()
            raise RuntimeError("fails once, to be started again")
        strategy.barrier("nobody comes")
    finally:
        strategy.teardown()
