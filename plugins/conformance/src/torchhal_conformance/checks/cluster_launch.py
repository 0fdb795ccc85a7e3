"""ENV-18 and 19: what a cluster environment says in processes that its launcher has really started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.precision import SinglePrecision
from torchhal.strategies import DDPStrategy
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import MissingRequirement, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._subprocesses import START, Job, call


def _launcher(component: ComponentUnderTest) -> Sequence[str]:
    known = component.own_launcher
    if known is None:
        raise MissingRequirement("how to start two processes is not known: give launcher=('srun', '-n', '2')")
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
