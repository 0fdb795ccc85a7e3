"""Run checks of one component, with pools of worker processes, and return a Result for each check."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import torch

from torchhal_conformance import _rank_check as rank_check
from torchhal_conformance._check import CHECKS, Check, CheckFailed, MissingRequirement, NotApplicable, Skipped
from torchhal_conformance._component_error import ComponentError, locate
from torchhal_conformance._component_under_test import ComponentUnderTest, missing
from torchhal_conformance._context import CheckContext
from torchhal_conformance._error_text import text_of
from torchhal_conformance._fork_server import ForkServer
from torchhal_conformance._limits import scaled
from torchhal_conformance._torch_globals import restore, torch_state
from torchhal_conformance._worker_pool import WorkerPool

ENVIRONMENT: Final = "environment:"
"""Beginning of the reason of a check that another machine could make."""
INPUT: Final = "input:"
"""Beginning of the reason of a check that the component's author could have made, by an argument."""
NOT_GIVEN: Final = "not given:"
"""Beginning of the reason of a check that an argument would make, and that changes no verdict without it."""
NOT_MADE: Final = "not made:"
"""Beginning of the reason of a check that was left out, since others before it hung."""
TIMEOUT_HERE: Final = 90.0
"""Seconds for a check that runs in this process: six times what any takes, and less than a user's patience."""
_RANK_START_TIMEOUT: Final = 150.0
"""Seconds for a check whose ranks have to be started first."""
_IMPORTED: Final = ("torch._dynamo", "torchhal_conformance._worker_pool", "torchhal.trainer")
"""Modules that the fork server imports once for all ranks: any optimizer imports torch._dynamo, which takes seconds."""


@dataclass(frozen=True)
class Result:
    """Result of one check; ``reason`` is empty for one that passed, and ``text`` is shown to an author.

    Attributes:
        error: ``CLASS: MESSAGE`` of an error that was raised in the place of a measured difference.
        at: ``FILE:LINE`` where the component raised it.
        traceback: of that error.
        follows_from: id of the failed check that this failure follows from.
        hung: True for a failure that took the whole time of its check.
    """

    check: Check
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    error: str = ""
    at: str = ""
    traceback: str = ""
    follows_from: str = ""
    hung: bool = False

    @property
    def told(self) -> str:
        """The reason, behind the check that it follows from."""
        return f"follows from {self.follows_from}: {self.reason}" if self.follows_from else self.reason

    @property
    def text(self) -> str:
        """The contract, the measured difference and the fix; one line for what follows, and for an error."""
        one = self.check
        if self.follows_from:
            return f"{one.id} follows from {self.follows_from}: {(self.reason.splitlines() or [''])[0]}"
        if self.error:
            return f"{one.id}: {self.reason}: {one.contract}"
        return f"{one.id}: {one.contract}\n\n{self.reason}\n\nWhy: {one.why}\nFix: {one.fix}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, from which :meth:`Session.restore_result` makes the result again."""
        return {**{one.name: getattr(self, one.name) for one in fields(self)}, "check": self.check.id}

    @property
    def verbose_text(self) -> str:
        """The text, with the traceback of an error."""
        return f"{self.text}\n{self.traceback}" if self.traceback else self.text


@cache
def shared_server() -> ForkServer:
    """Return the process from which the ranks of all sessions are forked: no plugin has been imported there."""
    # The plugins' folders may be anywhere on sys.path; the kit itself must be found without them.
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join([here, *filter(None, sys.path)])
    return ForkServer(_IMPORTED, {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


class Session:
    """Checks of one component, and their worker processes.

    Use it in a ``with`` block, or call :meth:`close`, which ends the processes.

    Args:
        component: what is checked.
        interruptible: False in a process that Ctrl-C doesn't reach: a KeyboardInterrupt is the component's then.
    """

    def __init__(self, component: ComponentUnderTest, *, interruptible: bool = True) -> None:
        self.component = component
        self._interruptible = interruptible
        self._worker_pools: dict[int, WorkerPool] = {}
        self._failed: dict[str, str] = {}
        """Id of a failed check -> the failed check that it follows from, itself if there is none."""
        self._errors: dict[tuple[str, str], str] = {}
        """An error and its place -> the check that failed with it first."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        for pool in self._worker_pools.values():
            pool.stop()
        self._worker_pools.clear()

    def worker_pool(self, size: int) -> WorkerPool:
        """Return the pool of ``size`` processes that the checks of this session share."""
        if size not in self._worker_pools:
            self._worker_pools[size] = WorkerPool(shared_server(), size, one_per_node=self.component.one_per_node)
        return self._worker_pools[size]

    def limit(self, one: Check) -> float:
        """Return the seconds after which this session has reported a hang of ``one``."""
        if one.world_sizes:
            return scaled(_RANK_START_TIMEOUT + len(one.world_sizes) * one.timeout)
        return _timeout_here(one)

    def restore_result(self, data: Mapping[str, Any]) -> Result:
        """Return a result of an earlier session, whose failure those of this session may follow from."""
        result = Result(**{**data, "check": CHECKS[data["check"]]})
        if result.outcome != "failed":
            return result
        raised = ComponentError(result.error, result.at, result.traceback) if result.error else None
        return replace(result, follows_from=self._cause(result.check, raised))

    def run(self, one: Check) -> Result:
        """Make one check and return its Result; only Ctrl-C is raised, no error of the component."""
        start = time.perf_counter()
        outcome, reason, hung = "passed", "", False
        raised: ComponentError | None = None
        try:
            with _kept_state(self.component.seed), _alarm(one), _without_exit(supervised=not self._interruptible):
                if lacking := missing(one, self.component):
                    raise Skipped(lacking)
                self._make(one)
        except Skipped as skip:
            outcome, reason = "skipped", str(skip)
        except BaseException as error:  # SystemExit too: a component may do anything
            if isinstance(error, KeyboardInterrupt) and self._interruptible:
                raise
            outcome, reason, hung = "failed", text_of(error), isinstance(error, CheckFailed) and error.hung
            if not isinstance(error, CheckFailed) or error.raised:
                raised = locate(error, self.component)
        seconds = round(time.perf_counter() - start, 3)
        if outcome != "failed":
            return Result(one, outcome, reason, seconds)
        cause = self._cause(one, raised)
        if raised is None:
            return Result(one, outcome, reason, seconds, follows_from=cause, hung=hung)
        return Result(one, outcome, raised.reason, seconds, raised.error, raised.at, raised.traceback, cause, hung)

    def _cause(self, one: Check, raised: ComponentError | None) -> str:
        """Return the id of the failed check that a failure of ``one`` follows from, empty for one of its own."""
        causes = [self._failed[other] for other in one.after if other in self._failed]
        if raised is not None and raised.at:
            place = _place(raised)
            causes += [self._errors[place]] if place in self._errors else []
        cause = causes[0] if causes else ""
        self._failed[one.id] = cause or one.id
        if raised is not None:
            self._errors.setdefault(_place(raised), self._failed[one.id])
        return cause if cause != one.id else ""

    def _make(self, one: Check) -> None:
        if not one.world_sizes:
            with folder() as own:
                one.function(CheckContext(self.component, own, self.worker_pool))
            return
        multi = bool(getattr(self.component.cls, "multi_device", True))
        accelerator = self.component.make_accelerator()
        lacking: list[str] = []
        refused: list[str] = []
        sizes = one.world_sizes if multi else (1,)
        for size in sizes:
            if size > accelerator.device_count() and not accelerator.oversubscribable:
                lacking.append(f"a world of {size} needs {size} devices, {accelerator.device_count()} are here")
                continue
            try:
                with folder() as shared:
                    self.worker_pool(size).run(
                        rank_check.run_check, one.id, self.component, str(shared), timeout=one.timeout
                    )
            except Skipped as skip:
                kind, _, reason = str(skip).partition(": ")
                (lacking if f"{kind}:" == ENVIRONMENT else refused).append(reason)
        # one size that was made says nothing about another that another machine could make
        if lacking:
            raise MissingRequirement("; ".join(dict.fromkeys(lacking)))
        if len(refused) == len(sizes):
            raise NotApplicable("; ".join(dict.fromkeys(refused)))


def _place(raised: ComponentError) -> tuple[str, str]:
    """Return what is the same for one error in one line, whichever rank of whichever world has raised it."""
    return re.sub(r"^rank \d+ of \d+: ", "", raised.error), raised.at


@contextmanager
def _alarm(one: Check) -> Iterator[None]:
    """Raise CheckFailed in a check that hangs in this process, which has no other process to see it.

    Not outside the main thread, nor where somebody else counts the time of this process, as pytest-timeout does.
    """
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if one.world_sizes or not usable or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    seconds = _timeout_here(one)

    def ring(signum: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame)[-6:])
        error = CheckFailed(f"HANG: the check was not done after {seconds:g} s; it was at\n{stack}")
        error.hung = True
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _timeout_here(one: Check) -> float:
    """Return the limit of a check that runs in this process."""
    return scaled(max(TIMEOUT_HERE, 2 * one.timeout))


@contextmanager
def _without_exit(*, supervised: bool) -> Iterator[None]:
    """Fail a check that calls ``os._exit`` in this process: a test run that it ends with 0 counts as passed.

    ``supervised``: another process sees that this one ends, and its exit code.
    """
    exit, process, thread = os._exit, os.getpid(), threading.get_ident()
    told = ""

    def refuse(status: int) -> NoReturn:
        nonlocal told
        if os.getpid() != process:  # a fork may
            exit(status)
        if threading.get_ident() != thread:  # a watchdog, such as pytest-timeout's, means it
            exit(status if supervised else status or 1)
        told = f"os._exit({status}) was called, which ends the user's process without a word"
        raise CheckFailed(told)

    os._exit = refuse
    try:
        yield
    except Exception as error:
        if told and text_of(error) != told:  # what follows from a call that the component has caught
            raise CheckFailed(told) from error
        raise
    finally:
        os._exit = exit
    if told:
        raise CheckFailed(told)


@contextmanager
def folder() -> Iterator[Path]:
    """Yield an empty folder, which is removed at the end of the block."""
    made = tempfile.mkdtemp(prefix="torchhal-")
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _working_folder() -> str | None:
    """Return the working folder; None where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


@contextmanager
def _kept_state(seed: int) -> Iterator[None]:
    """Seed random numbers, and restore at the end their state, torch's switches, the folder and the environment."""
    switches, numbers, state = torch_state(), torch.get_rng_state(), random.getstate()
    folder, environ, temporary = _working_folder(), dict(os.environ), tempfile.tempdir
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        restore(switches)
        torch.set_rng_state(numbers)
        random.setstate(state)
        tempfile.tempdir = temporary
        for name in {*environ, *os.environ}:  # one by one: threads may read the others
            if environ.get(name) != os.environ.get(name):
                os.environ.pop(name, None)
                os.environ.update({name: environ[name]} if name in environ else {})
        if folder is not None and _working_folder() != folder:
            os.chdir(folder)
