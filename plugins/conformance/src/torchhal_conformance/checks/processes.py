"""STR: how a strategy's processes start, fail, are stopped, and end."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Module
from torchhal.launchers import ExternalLauncher
from torchhal.resolve import Request, resolve
from torchhal.strategies import Strategy
from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance._subprocesses import START, CompletedJob, Job, call
from torchhal_conformance.checks.trainer import (
    BATCH,
    FOREVER,
    Interrupted,
    ThreeLayers,
    component_argument,
    data,
    learned,
    loader,
    plain_loop,
    trainer,
    trainer_of,
)

GONE_WITHIN: Final = 30.0
"""Seconds from a rank's failure to the end of every process."""


def two_processes(component: ComponentUnderTest) -> Strategy:
    """Return the strategy for two devices as a script gets it that no launcher has started."""
    request = Request(accelerator=component.accelerator, strategy=component_argument(component, ""), devices=2)
    strategy: Strategy = resolve(request).build()
    return strategy


def _require_launcher(component: ComponentUnderTest) -> None:
    if not component.cls.multi_device:
        raise NotApplicable("the strategy is for one process")
    with variables():
        if isinstance(two_processes(component).make_launcher(), ExternalLauncher):
            raise NotApplicable("the strategy starts no processes")


class Failing(Module, ThreeLayers):
    """Module whose second batch is an error on rank 1, while the other ranks wait for it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 1:
            Path(self.folder, "failed").write_text(str(time.time()), encoding="utf-8")
            raise RuntimeError(CAUSE)


CAUSE: Final = "the cause that everybody has to hear of"


@check("STR-32", needs=["device", "two devices", "posix"])
def one_rank_fails(context: CheckContext) -> None:
    """When one rank raises, the job that the strategy has started ends in time, with a code other than 0.

    It shows the original traceback, and leaves no process.

    Why: the others waited for the rank that had failed, and the scheduler saw a healthy job.
    Fix: start processes with torchhal's launchers; swallow no error; end in teardown what the set-up has started.
    """
    _require_launcher(context.component)
    ended = Job(call(context.folder, _fail, context.component, str(context.folder)), context.folder).finish(START)
    at = time.time()
    failed = context.folder / "failed"
    require(failed.exists(), f"rank 1 never came to its second batch; the job ended with {ended.code}:\n{ended.output}")
    require(ended.code != 0, f"the job ended with 0:\n{ended.output}")
    shown = "Traceback" in ended.output and CAUSE in ended.output and "validation_step" in ended.output
    require(shown, f"the traceback of rank 1 is not shown:\n{ended.output}")
    require(not ended.left, f"{len(ended.left)} processes are left when the job has ended")
    seconds = at - float(failed.read_text(encoding="utf-8"))
    require(seconds < GONE_WITHIN, f"it took {seconds:.1f} s from the failure to the end, allowed {GONE_WITHIN:g}")


def _fail(component: ComponentUnderTest, folder: str) -> None:
    batches = DataLoader(data(), batch_size=BATCH // 2)
    trainer_of(component, 2, folder).validate(Failing(folder), batches, verbose=False)


# -- workers -------------------------------------------------------------------------------------------------


class Logged(Module, ThreeLayers):
    """Module that learns y = (3 x + 1) / 12 and logs its loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("distance", ThreeLayers.training_step(self, batch, batch_idx))


@check("STR-33", features=["spawn"], needs=["device", "two devices", "posix"])
def results_return(context: CheckContext) -> None:
    """What workers have trained comes back: the weights, metrics, the best checkpoint's path; no temporary file stays.

    Why: fit ran in copies, and the model that the script went on with was the untrained one.
    Fix: return from the launcher what rank 0 returned; write what is too large for a pipe to a file without a name.
    """
    _require_launcher(context.component)
    weights, metrics, best, files = context.run_in_subprocess(
        _train_in_workers, context.component, str(context.folder), timeout=START
    )
    context.restart_subprocess()
    close("the weights in the process that called fit", weights, learned(plain_loop(2)), 1e-4)
    require("distance" in metrics, f"the metrics there are {metrics}")
    require(best and os.path.exists(best), f"best_model_path there is {best!r}, which doesn't exist")
    require(not files, f"temporary files are left: {', '.join(files)}")


def _train_in_workers(component: ComponentUnderTest, folder: str) -> tuple[Any, ...]:
    temporary = os.path.join(folder, "tmp")
    os.mkdir(temporary)
    with variables({"TMPDIR": temporary}):
        tempfile.tempdir = None
        from torchhal import ModelCheckpoint

        best = ModelCheckpoint(dirpath=os.path.join(folder, "best"), monitor="distance")
        runner = trainer_of(component, 2, folder, max_epochs=2, enable_checkpointing=True, callbacks=[best])
        model, batches = Logged(), DataLoader(data(), batch_size=BATCH // 2)
        runner.fit(model, batches, batches)
        metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    # torch keeps a cache for its compiler there
    files = sorted(name for name in os.listdir(temporary) if not name.startswith("torchinductor"))
    return learned(model), metrics, best.best_model_path, files


@check("STR-34", features=["spawn"], needs=["device", "two devices", "posix"])
def settings_travel(context: CheckContext) -> None:
    """Seed, determinism and default dtype of the calling process hold in its workers.

    What they write to a parameter doesn't reach the caller's.

    Why: workers started with torch's defaults trained in another dtype, without the seed.
    Fix: send random states and switches along, as torchhal's launchers do; share no memory with workers.
    """
    _require_launcher(context.component)
    here, there, parameter = context.run_in_subprocess(_settings, context.component, timeout=START)
    context.restart_subprocess()
    for name, value in here.items():
        same(f"{name} in a worker", there[name], value)
    same("the caller's parameter after a worker wrote to its own", parameter, 0.0)


def _settings(component: ComponentUnderTest) -> tuple[dict[str, Any], dict[str, Any], float]:
    with variables():
        strategy = two_processes(component)
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        torch.manual_seed(11)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        there = strategy.make_launcher().launch(_settings_and_write, model)
        return _now(), there, float(model.weight.detach())


def _settings_and_write(model: nn.Linear) -> dict[str, Any]:
    with torch.no_grad():
        model.weight.fill_(5.0)
    return _now()


def _now() -> dict[str, Any]:
    return {
        "the first random number": float(torch.rand((), dtype=torch.float32)),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the default dtype": str(torch.get_default_dtype()),
    }


# -- signals -------------------------------------------------------------------------------------------------


@check("STR-40", needs=["device"], world_sizes=(2,), timeout=60)
def terminated(rank: RankContext) -> None:
    """SIGTERM to one process ends fit in all of them, after the same step and with status 143.

    The strategy is torn down, and the handlers of signals are those from before.

    Why: a scheduler sends SIGTERM and, 30 s later, SIGKILL: what has not been written by then is lost.
    Fix: install no handler of your own, or put the previous one back in teardown.
    """
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in signals}
    runner = trainer(rank, max_epochs=FOREVER)
    model = Interrupted(signal.SIGTERM if rank.rank == rank.size - 1 else None)
    status: object = "none: it returned"
    try:
        runner.fit(model, loader(rank))
    except SystemExit as end:
        status = end.code
    same("the status with which fit ended the process", status, 128 + signal.SIGTERM)
    steps = rank.gather(runner.global_step)
    require(len(set(steps)) == 1, f"the ranks stopped after different numbers of steps: {steps}")
    require(not runner.strategy.is_set_up, "the strategy is still set up")
    require(not dist.is_initialized(), "the process group is still there")
    for number in signals:
        now = signal.getsignal(number)
        require(now == before[number], f"the handler of {number.name} was {before[number]}, and is {now}")


# -- peers ---------------------------------------------------------------------------------------------------


class Still(Module):
    """Module that trains at a learning rate of 0: a change of its weight is not the optimizer's."""

    def __init__(self, weight: float, folder: str, batches: int | None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, weight)
        self.folder = folder
        self.batches = batches
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        time.sleep(0.05)  # the others need time to come and go
        if self.batches is None:
            strategy: Any = self.trainer.strategy
            _put(self.folder, "joining", strategy.joining)
            _put(self.folder, "steps", self.trainer.global_step)
            self.trainer.should_stop = os.path.exists(os.path.join(self.folder, "stop"))
        else:
            self.trainer.should_stop = self.seen >= self.batches
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@check("STR-43", features=["elastic"], needs=["device", "posix"])
def peers_come_and_go(context: CheckContext) -> None:
    """A process that joins a run has the run's weights and not its own, and the run goes on when it leaves.

    The strategy's ``joining`` says how: the constructor's arguments for one that joins, empty while none can.

    Changed: that weights which are the same everywhere stay so is what the kit can ask of any average; what is
    averaged, and when, differs from library to library, and is for the plugin's own tests.

    Why: who came late trained a model of its own, and who left took the run along.
    Fix: take over weights and optimizer state before the first step; wait for no peer that is gone.
    """
    require(hasattr(context.component.cls, "joining") or hasattr(context.create(), "joining"), "it has no 'joining'")
    folder = str(context.folder)
    first = Job(call(context.folder, _peer, context.component, folder, "first"), context.folder)
    try:
        _until(first, lambda: _get(folder, "joining"), "it can be joined")
        second = Job(call(context.folder, _peer, context.component, folder, "second"), context.folder).finish(START)
        require(second.code == 0, f"the process that joined ended with {second.code}:\n{second.output}")
        goal = _get(folder, "steps") + 3
        _until(first, lambda: _get(folder, "steps") >= goal, "it has made three more steps, after the other one left")
        Path(folder, "stop").touch()
        ended = first.finish(START)
    finally:
        first.kill()
    require(ended.code == 0, f"the first process ended with {ended.code}:\n{ended.output}")
    close("the weight of the one that joined, beside the run's", _get(folder, "second"), 5.0, 1e-3)
    close("the weight of the first one at its end", _get(folder, "first"), 5.0, 1e-3)


def _peer(component: ComponentUnderTest, folder: str, name: str) -> None:
    first = name == "first"
    strategy = component.create(**({} if first else _get(folder, "joining")))
    model = Still(5.0 if first else 50.0, folder, None if first else 4)
    runner = trainer_of(component, 1, folder, strategy=strategy, max_epochs=FOREVER)
    runner.fit(model, DataLoader(data(), batch_size=BATCH))
    _put(folder, name, float(model.layer.weight.detach()))


def _put(folder: str, name: str, value: Any) -> None:
    path = os.path.join(folder, name)
    with open(f"{path}.new", "wb") as file:
        pickle.dump(value, file)
    os.replace(f"{path}.new", path)


def _get(folder: str, name: str) -> Any:
    path = Path(folder, name)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _until(job: Job, done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + START
    while not done():
        if not job.running or time.monotonic() > deadline:
            state = "is still running" if job.running else "has ended"
            raise CheckFailed(f"the first process {state}, but not because {what}:\n{job.output()}")
        time.sleep(0.1)


# -- several jobs --------------------------------------------------------------------------------------------


@check("STR-44", features=["launches"], needs=["device", "two devices", "posix"])
def two_jobs(context: CheckContext) -> None:
    """Two jobs that are started on one host at the same time meet each for itself.

    Why: with one port for all the second job fails, or its ranks join the first.
    Fix: let the system choose a free port, in the process that listens on it.
    """
    _require_launcher(context.component)
    jobs = [
        Job(call(context.folder, _meet, context.component, str(context.folder), number), context.folder)
        for number in range(2)
    ]
    ended = [_finish(job) for job in jobs]
    told = "\n".join(f"job {number} ended with {one.code}:\n{one.output}" for number, one in enumerate(ended))
    require(all(one.code == 0 for one in ended), told)
    for number in range(len(ended)):
        found = sorted(path.read_text() for path in context.folder.glob(f"sum-{number}-*"))
        expected = str(float(20 * number + 1))  # ranks 0 and 1 add 10 times the job's number each
        same(f"the sums on the ranks of job {number}", found, [expected, expected])


def _finish(job: Job) -> CompletedJob:
    try:
        return job.finish(START)
    except CheckFailed as error:
        return CompletedJob(-1, str(error), ())


def _meet(component: ComponentUnderTest, folder: str, number: int) -> None:
    strategy = two_processes(component)
    strategy.make_launcher().launch(_meet_and_add, strategy, folder, number)


def _meet_and_add(strategy: Strategy, folder: str, number: int) -> None:
    try:
        strategy.setup_environment()
        if strategy.is_global_zero:  # neither ends before the other one is there
            Path(folder, f"up-{number}").touch()
            _wait_for(folder, 1 - number)
        strategy.barrier("both jobs are up")
        mine = torch.tensor([10.0 * number + strategy.global_rank], device=strategy.root_device)
        total = float(strategy.reduce(mine, "sum"))
        Path(folder, f"sum-{number}-{strategy.global_rank}").write_text(str(total), encoding="utf-8")
    except BaseException:
        Path(folder, f"down-{number}").touch()  # the other one need not wait until this one has ended
        raise
    finally:
        strategy.teardown()


def _wait_for(folder: str, job: int) -> None:
    deadline = time.monotonic() + START / 3
    while not os.path.exists(os.path.join(folder, f"up-{job}")):
        if time.monotonic() > deadline or os.path.exists(os.path.join(folder, f"down-{job}")):
            raise RuntimeError(f"job {job} did not come up")
        time.sleep(0.05)
