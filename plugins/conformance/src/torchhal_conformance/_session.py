"""Making checks: one subject, its worlds of processes, and a Result for each check."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from torchhal_conformance import _rank_context as rank_context
from torchhal_conformance._check import Check, CheckFailed, MissingRequirement, NotApplicable, Skipped
from torchhal_conformance._component_under_test import ComponentUnderTest, missing
from torchhal_conformance._context import CheckContext
from torchhal_conformance._fork_server import ForkServer
from torchhal_conformance._limits import scaled
from torchhal_conformance._torch_globals import restore, torch_state
from torchhal_conformance._worker_pool import WorkerPool

ENVIRONMENT: Final = "environment:"
PATIENCE: Final = 240.0
"""Seconds for a check that runs in this process: many times what any takes, and less than a user's patience."""
_IMPORTED: Final = ("torch._dynamo", "torchhal_conformance._worker_pool", "torchhal.trainer")
"""What the ranks would import, each for itself: torch._dynamo for the first step of any optimizer, in seconds."""


@dataclass(frozen=True)
class Result:
    """What came of one check. ``reason`` is empty for one that passed; ``text`` is what to show an author."""

    check: Check
    outcome: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The contract, what was measured, and what to do."""
        one = self.check
        return f"{one.id}: {one.contract}\n\n{self.reason}\n\nWhy: {one.why}\nFix: {one.fix}"


@cache
def shared_server() -> ForkServer:
    """The process from which the ranks of all sessions are forked: no plugin has been imported there."""
    # The plugins' folders may be anywhere on sys.path; the kit itself must be found without them.
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join([here, *filter(None, sys.path)])
    return ForkServer(_IMPORTED, {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


class Session:
    """Makes checks of one subject. Holds processes: use it in a ``with`` block, or call :meth:`close`."""

    def __init__(self, subject: ComponentUnderTest) -> None:
        self.subject = subject
        self._worlds: dict[int, WorkerPool] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of the worlds."""
        for world in self._worlds.values():
            world.stop()
        self._worlds.clear()

    def world(self, size: int) -> WorkerPool:
        """The processes, ``size`` of them, that the checks of this session share."""
        if size not in self._worlds:
            self._worlds[size] = WorkerPool(shared_server(), size)
        return self._worlds[size]

    def run(self, one: Check) -> Result:
        """Make one check. Whatever the part does, short of Ctrl-C, is a Result."""
        start = time.perf_counter()
        outcome, reason = "passed", ""
        try:
            if lacking := missing(one, self.subject):
                raise Skipped(lacking)
            with _kept_state(self.subject.seed), _alarm(one):
                self._make(one)
        except Skipped as skip:
            outcome, reason = "skipped", str(skip)
        except CheckFailed as failure:
            outcome, reason = "failed", str(failure)
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit too: a part may do anything
            outcome, reason = "failed", traceback.format_exc().rstrip()
        return Result(one, outcome, reason, round(time.perf_counter() - start, 3))

    def _make(self, one: Check) -> None:
        if not one.worlds:
            with folder() as own:
                one.function(CheckContext(self.subject, own, self.world))
            return
        multi = bool(getattr(self.subject.part, "multi_device", True))
        accelerator = self.subject.make_accelerator()
        lacking: list[str] = []
        refused: list[str] = []
        sizes = one.worlds if multi else (1,)
        for size in sizes:
            if size > accelerator.device_count() and not accelerator.oversubscribable:
                lacking.append(f"a world of {size} needs {size} devices, {accelerator.device_count()} are here")
                continue
            try:
                with folder() as shared:
                    self.world(size).run(rank_context.run_check, one.id, self.subject, str(shared), timeout=one.timeout)
            except Skipped as skip:
                kind, _, reason = str(skip).partition(": ")
                (lacking if f"{kind}:" == ENVIRONMENT else refused).append(reason)
        # one size that was made says nothing about another that another machine could make
        if lacking:
            raise MissingRequirement("; ".join(dict.fromkeys(lacking)))
        if len(refused) == len(sizes):
            raise NotApplicable("; ".join(dict.fromkeys(refused)))


@contextmanager
def _alarm(one: Check) -> Iterator[None]:
    """Raise CheckFailed in a check that hangs in this process, which has no other process to see it.

    Not outside the main thread, nor where somebody else counts the time of this process, as pytest-timeout does.
    """
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if one.worlds or not usable or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    seconds = scaled(max(PATIENCE, 2 * one.timeout))

    def ring(signum: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame)[-6:])
        raise CheckFailed(f"HANG: the check was not done after {seconds:g} s; it was at\n{stack}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder that is gone afterwards."""
    made = tempfile.mkdtemp(prefix="torchhal-conformance-")
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _kept_state(seed: int) -> Iterator[None]:
    """Seed what is random, and put that and torch's switches back at the end."""
    switches, numbers, state = torch_state(), torch.get_rng_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        restore(switches)
        torch.set_rng_state(numbers)
        random.setstate(state)
