"""Start, watch and end the actors of one launch."""

from __future__ import annotations

import io
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, ClassVar, Protocol

from torchhal.distributed import process
from torchhal.distributed.failures import Failure, exit_for_signal
from torchhal.distributed.signals import SignalRecorder
from torchhal.errors import LaunchError
from torchhal.launchers import Launcher, serialization
from torchhal.launchers.worker_outcome import WorkerOutcomes
from torchhal_ray import _placement as placement
from torchhal_ray import _sdk as sdk
from torchhal_ray import tune
from torchhal_ray._driver_queue import MessageReader
from torchhal_ray._ranks import RankSlot, seats, shared_devices
from torchhal_ray._worker import Assignment, Started, Worker, send_signal

GRACE = 5.0
"""Seconds that the others get to come back by themselves after a rank has raised."""

DEATH_GRACE = 2.0
"""The same after a process or node has died: what they do is lost anyway, but they may be writing a file."""

START = 300.0
"""Seconds in which workers that have room have to be there: torch, imported from a network's disk, takes minutes."""

INSTEAD = (
    "or make the object in a hook that runs in the worker (setup, configure_model); a module that isn't on the "
    "workers' nodes is sent there with ray.init(runtime_env={'py_modules': [...]})"
)

_ON_SIGTERM = re.compile(r"receives a SIGTERM|exit code 143")
"""What Ray says of a worker that its own handler of SIGTERM, or that of ``worker``, has ended."""

WORKER = "TORCHHAL_RAY_WORKER"
"""Set in every worker. pyproject.toml declares it, so that a worker's Trainer asks this plugin who started it.

Ray's own RAY_JOB_ID is declared as well; a worker that Ray has started ahead of any job may lack it.
"""
_PRIVATE = (process.LAUNCH_ID, process.LAUNCH_KIND, process.PARENT_PID, process.PARENT_IS_MAIN, process.REPORT_FD)

_JOB = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
"""What rank 0 needs to have the scheduler's job requeued in which this process runs, and its Ray cluster."""


class ActorSettings(Protocol):
    """The arguments of :class:`torchhal_ray.RayEnvironment`."""

    num_workers: int | None
    placement: str
    timeout: float
    stop_timeout: float
    runtime_env: dict[str, Any]
    init: dict[str, Any]
    stop_signals: tuple[int, ...]


class ActorLauncher(Launcher):
    """A launcher that runs the function in actors of a placement group; the caller waits and is no rank.

    SIGINT and SIGTERM to this process are passed on to the workers, as SIGTERM, and the environment's stop signals as
    what they are; the workers get ``stop_timeout`` seconds to save. Then KeyboardInterrupt or
    ``SystemExit(128 + signal)`` is raised here.
    """

    name: ClassVar[str] = "ray"
    interactive: ClassVar[bool] = True
    returns_to_caller: ClassVar[bool] = False

    def __init__(
        self,
        settings: ActorSettings,
        resources: Mapping[str, float],
        prepare: Callable[[], None],
        *,
        num_nodes: int,
        per_node: int,
    ) -> None:
        self.settings = settings
        self.resources = dict(resources)
        self.prepare = prepare
        if settings.num_workers is not None:
            self.bundles, self.per_bundle, self.placement = settings.num_workers, 1, settings.placement
        else:
            self.bundles, self.per_bundle, self.placement = num_nodes, per_node, "STRICT_SPREAD"

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            ray = sdk.connect(self.settings.init)
            with closing(
                serialization.pack_function(
                    function, args, kwargs, self.prepare, instead=INSTEAD, pickle_module=ray.cloudpickle
                )
            ) as file:
                content = file.content()
        except SystemExit as error:
            if error.code == signal.SIGTERM:  # of the handler that ray.init installs
                raise exit_for_signal(signal.SIGTERM, agreed=False) from None
            raise
        with SignalRecorder(self.settings.stop_signals) as signals:
            crew = _WorkerGroup(ray, self, signals)
            try:
                crew.start(content)
                crew.supervise()
            finally:
                crew.end()
        crew.verdict.raise_outcome(signals.received)
        assert crew.result is not None
        return serialization.read(io.BytesIO(crew.result), map_location="cpu")

    def __repr__(self) -> str:
        return f"ActorLauncher({self.bundles} x {self.per_bundle}, placement={self.placement!r})"


class _WorkerGroup:
    def __init__(self, ray: Any, launcher: ActorLauncher, signals: SignalRecorder) -> None:
        self._ray, self._launcher, self._signals = ray, launcher, signals
        self._settings = launcher.settings
        self._group: Any = None
        self._seats: list[RankSlot] = []
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._running: dict[Any, int] = {}
        self._in_trial = tune.in_trial(ray)
        self._letters = MessageReader(ray, tune.report if self._in_trial else None)
        self._end_at: float | None = None
        self.verdict = WorkerOutcomes(launcher.bundles * launcher.per_bundle, instead=INSTEAD)
        self.result: bytes | None = None

    # -- start -----------------------------------------------------------------------------------------------

    def start(self, content: bytes) -> None:
        """Return when the call runs on all ranks, or when something has come in between."""
        launcher = self._launcher
        bundle = {name: amount * launcher.per_bundle for name, amount in launcher.resources.items()}
        bundles = [bundle] * launcher.bundles
        if self._in_trial:
            self._group, first = placement.of_trial(self._ray, bundles), 1
        else:
            stopped = lambda: bool(self._signals.received)  # noqa: E731
            group = placement.reserve(self._ray, bundles, launcher.placement, self._settings.timeout, stopped)
            if group is None:
                return
            self._group, first = group, 0
        self._seats = self._find_seats(first)
        launch_id = uuid.uuid4().hex
        own = [self._variables(launch_id, seat) for seat in self._seats]
        self._actors = [self._make(seat, variables) for seat, variables in zip(self._seats, own, strict=True)]
        ready: list[Started] | None = self._wait_for([actor.started.remote() for actor in self._actors])
        if ready is None:
            return
        self._pids = [one.pid for one in ready]
        served = self._wait_for([self._actors[0].serve.remote()])
        if served is None:
            return
        address, port = served[0]
        settings, folder, call = serialization.collect_settings(), os.getcwd(), self._ray.put(content)
        for seat, actor in zip(self._seats, self._actors, strict=True):
            variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
            if launcher.per_bundle > 1:
                node = [one.devices for other, one in zip(self._seats, ready, strict=True) if _same_node(other, seat)]
                variables.update(shared_devices(node))
            post = self._letters.post if seat.rank == 0 else None
            self._running[actor.run.remote(Assignment(variables, settings, folder, post), call)] = seat.rank

    def _find_seats(self, first: int) -> list[RankSlot]:
        from ray.util.placement_group import placement_group_table

        table: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        table = {index: node for index, node in table.items() if first <= index < first + self._launcher.bundles}
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        here = self._ray.get_runtime_context().get_node_id()
        return seats(table, addresses, self._launcher.per_bundle, driver=here)

    def _variables(self, launch_id: str, seat: RankSlot) -> dict[str, str]:
        """Return all rank variables but the meeting place, which rank 0 finds."""
        passed = {name: value for name, value in os.environ.items() if name.startswith("TORCHHAL_") or name in _JOB}
        ranks = process.rank_variables(
            launch_id=launch_id,
            kind=self._launcher.name,
            rank=seat.rank,
            local_rank=seat.local_rank,
            node_rank=seat.node_rank,
            world_size=len(self._seats),
            local_world_size=seat.local_world_size,
            address="",
            port=0,
        )
        asked = self._settings.runtime_env.get("env_vars", {})
        own = {**ranks, "NNODES": str(1 + max(one.node_rank for one in self._seats)), WORKER: "1"}
        return {**{name: passed[name] for name in passed if name not in _PRIVATE}, **asked, **own}

    def _make(self, seat: RankSlot, variables: dict[str, str]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._launcher.resources)
        return (
            self._ray.remote(Worker)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=resources.pop("memory", None),
                resources=resources or None,
                max_restarts=0,
                runtime_env={**self._settings.runtime_env, "env_vars": variables},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=seat.bundle
                ),
            )
            .remote(seat.rank)
        )

    def _wait_for(self, answers: list[Any]) -> list[Any] | None:
        """Return the actors' answers, by rank; None if a signal comes first, or one has died, which is noted."""
        deadline = time.monotonic() + START
        waiting = {answer: rank for rank, answer in enumerate(answers)}
        while waiting:
            if self._signals.received:
                return None
            done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=0.2)
            for answer in done:
                rank = waiting.pop(answer)
                try:
                    self._ray.get(answer)
                except self._ray.exceptions.RayTaskError as error:
                    raise LaunchError(f"{self._seats[rank]} could not start: {error.cause}") from error
                except self._ray.exceptions.RayError as error:
                    self._died(rank, error)
                    return None
            if waiting and time.monotonic() > deadline:
                late = "; ".join(str(self._seats[rank]) for rank in waiting.values())
                raise LaunchError(
                    f"workers have not started within {START:g} s, though there is room for them: {late}. The logs of "
                    "Ray's workers on those nodes say what they wait for"
                )
        return self._ray.get(answers)  # type: ignore[no-any-return]

    # -- watch -----------------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Return when the call has ended on all ranks, well or not."""
        passed_on = 0
        while self._running:
            letters = self._letters.waiting()
            done, _ = self._ray.wait([*self._running, *letters], num_returns=1, timeout=0.2)
            for answer in done:
                if answer in self._running:
                    self._take(self._running.pop(answer), answer)
                else:
                    self._letters.take(answer)
            if len(self._signals.received) > passed_on:
                passed_on = len(self._signals.received)
                if passed_on == 1:
                    first = self._signals.received[0]
                    self._signal(signal.SIGTERM if first == signal.SIGINT else first)
                self._end_soon(self._settings.stop_timeout if passed_on == 1 else 0.0)
            if self._end_at is not None and time.monotonic() > self._end_at:
                if self._signals.received:
                    late = "; ".join(str(self._seats[rank]) for rank in sorted(self._running.values()))
                    process.write_stderr(f"torchhal: killed, for the signal's time was up: {late}\n")
                return

    def _take(self, rank: int, answer: Any) -> None:
        try:
            message, result = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            # what a rank raises it tells: this is about the call, before it began or after it
            self.verdict.problem = self.verdict.problem or LaunchError(f"{self._seats[rank]}: {error}")
            self._end_soon(0.0)
            return
        except self._ray.exceptions.RayError as error:
            self._died(rank, error)
            return
        if rank == 0:
            self.result = result
        failure = self.verdict.take(rank, message)
        if failure is not None:
            agreed = failure.stopped and not failure.stop_signal
            self._end_soon(self._settings.stop_timeout if agreed else GRACE)
        elif self.verdict.problem is not None:
            self._end_soon(0.0)

    def _died(self, rank: int, error: BaseException) -> None:
        seat = self._seats[rank]
        reason = _reason(error)
        failure = Failure(rank, f"on node {seat.address} ({seat.node_id[:8]}) died: {reason}")
        if self._signals.received and _ON_SIGTERM.search(reason):  # before it had begun the call
            failure = Failure.from_signal(rank, self._signals.received[0])
        self.verdict.failures.append((failure, None))
        self._end_soon(DEATH_GRACE)

    def _end_soon(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._end_at = at if self._end_at is None else min(self._end_at, at)

    def _signal(self, signum: int) -> None:
        """Send a signal to all workers: by a task on each node, for their own thread is busy."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        send = self._ray.remote(send_signal)
        for node in {seat.node_id for seat in self._seats}:
            pids = [self._pids[seat.rank] for seat in self._seats if seat.node_id == node]
            send.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(pids, signum)

    # -- end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End all actors and the placement group, whatever ended the supervision."""
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        if self._running:  # returns when they are dead
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=5.0)
        self._letters.close()
        if self._group is not None and not self._in_trial:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)


def _same_node(one: RankSlot, other: RankSlot) -> bool:
    return one.node_rank == other.node_rank


def _reason(error: BaseException) -> str:
    """Return Ray's reason of a death, without its list of ids."""
    lines = [line for line in str(error).splitlines()[1:] if line.strip() and not line.startswith("\t")]
    text = "\n".join(lines) or str(error)
    return text if len(text) < 1500 else f"{text[:700]}\n...\n{text[-700:]}"
