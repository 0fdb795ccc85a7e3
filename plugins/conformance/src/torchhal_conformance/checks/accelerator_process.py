"""ACC-54 to ACC-58: what a run and many questions leave behind in a process, and regions of a profile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import torch

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._limits import scaled
from torchhal_conformance.checks._open_files import open_files
from torchhal_conformance.checks._process_state import process_state


@check("ACC-54", since="0.2", needs=["device", "posix"], after=("ACC-10",))
def process_left_as_it_was(context: CheckContext) -> None:
    """After teardown() the process may use the cores that it could before, and has its signal handlers and folder.

    This also holds in a process that is bound to one core, handles signals, and has changed its folder.

    Why: each run in a notebook had half of the cores of the one before, and so had all child processes.
    Fix: keep in setup_device() what was there, and restore it in teardown().
    """
    context.restart_subprocess()
    try:
        lives = context.run_in_subprocess(_three_lives, context.component, str(context.folder))
    finally:
        context.restart_subprocess()
    for life, (before, after) in enumerate(lives, 1):
        for name, value in after.items():
            same(f"{name} after teardown() of life {life}", value, before[name])


def _three_lives(component: ComponentUnderTest, folder: str) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Return how the process was before and after each of three runs: two as it began, one with settings of its own."""
    if hasattr(os, "sched_setaffinity"):  # the kit's own process may have been left on some cores alone
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    lives, before = [], process_state()
    for life in range(3):
        if life == 2:
            _change_process_state(folder)
            before = process_state()
        accelerator = component.create()
        device = accelerator.get_parallel_devices(accelerator.parse_devices(1))[0]
        accelerator.setup_device(device)
        accelerator.setup(None)
        torch.ones(8, device=device).sum()
        accelerator.synchronize(device)
        accelerator.teardown()
        lives.append((before, process_state()))
    return lives


def _change_process_state(folder: str) -> None:
    os.chdir(folder)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # SIGUSR1 is the kit's, for stacks of what hangs
        signal.signal(number, _handle)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])


def _handle(number: int, frame: Any) -> None:
    """Do nothing for a signal that the program handles."""


@check("ACC-55", since="0.2", needs=["device", "posix"], after=("ACC-01",))
def asked_after_a_fork(context: CheckContext) -> None:
    """A child that was forked after devices were counted counts as many, in no more than a few seconds.

    Asked are availability(), device_count(), auto_device_count() and parse_devices(), in both processes.

    Why: a thread, a lock or a connection that the parent had is gone in the child, which stands still without an error.
    Fix: keep the result, or ask in the calling thread.
    """
    context.restart_subprocess()  # one that holds a device may not fork
    try:
        here, there = context.run_in_subprocess(_ask_and_fork, context.component, scaled(20.0), timeout=60)
    finally:
        context.restart_subprocess()
    if there is None:
        raise CheckFailed("a forked child that counts devices HANGS")
    same("what a forked child counts", there, here)


def _ask(component: ComponentUnderTest) -> str:
    accelerator = component.create()
    devices = accelerator.parse_devices("auto")
    return repr(
        (bool(component.cls.availability()), accelerator.device_count(), accelerator.auto_device_count(), devices)
    )


def _ask_and_fork(component: ComponentUnderTest, patience: float) -> tuple[str, str | None]:
    here = _ask(component)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, _ask(component).encode())
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.set_blocking(reader, False)
    deadline, told = time.monotonic() + patience, b""
    while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.02)
    try:
        told = os.read(reader, 65536)
    except BlockingIOError:
        pass
    finally:
        os.close(reader)
    if not told:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        return here, None
    return here, told.decode()


@check("ACC-56", since="0.2", needs=["device", "posix"], after=("ACC-01", "ACC-10"))
def class_that_stays(context: CheckContext) -> None:
    """The class attributes are the same after a run as before, and many questions leave no file open.

    Why: what a program may do depends on what it did before; a sweep of a thousand runs ends in "too many open files".
    Fix: keep what one object has found out in that object; close what was opened in a finally.
    """
    try:
        before, after, opened = context.run_in_subprocess(_attributes_and_files, context.component, timeout=60)
    finally:
        context.restart_subprocess()
    for name in sorted({*before, *after}):
        told = f"the class attribute {name} after a set-up and a teardown"
        same(told, after.get(name, "not there"), before.get(name, "not there"))
    asked = "availability(), device_count(), auto_device_count() and parse_devices()"
    require(opened < _ASKED // 2, f"{_ASKED} times {asked} left {opened} files open")


_ASKED = 50


def _attributes_and_files(component: ComponentUnderTest) -> tuple[dict[str, str], dict[str, str], int]:
    before = _class_attributes(component.cls)
    accelerator = component.create()
    device = accelerator.get_parallel_devices(accelerator.parse_devices(1))[0]
    accelerator.setup_device(device)
    accelerator.setup()
    torch.ones(8, device=device).sum()
    accelerator.teardown()
    after = _class_attributes(component.cls)
    _ask(component)
    opened = open_files()
    for _ in range(_ASKED):
        _ask(component)
    return before, after, open_files() - opened


def _class_attributes(cls: type[Any]) -> dict[str, str]:
    """Return the data of a class, by its public names."""
    found = {}
    for name in dir(cls):
        value = getattr(cls, name, None)
        if name.startswith("_") or callable(value) or isinstance(value, property):
            continue
        found[name] = repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    return found


@check("ACC-57", since="0.2", needs=["device"], after=("ACC-27",))
def regions_of_threads(context: CheckContext) -> None:
    """A profile_region() that one thread leaves is its own, not the one that another thread has entered since.

    Why: with a loader's or a logger's thread beside it the trace blames "forward" for what a thread did.
    Fix: keep no stack of regions in the accelerator; each context holds its own.
    """
    accelerator, device = context.setup_accelerator()
    entered, leave = threading.Event(), threading.Event()

    def beside() -> None:
        with accelerator.profile_region("of another thread"):
            entered.set()
            leave.wait(scaled(10.0))

    thread = threading.Thread(target=beside)
    with accelerator.profile() as profiled:
        with accelerator.profile_region("of this thread"):
            thread.start()
            entered.wait(scaled(10.0))
            torch.ones(4, device=device).sum()
        with accelerator.profile_region("behind it"):
            time.sleep(0.05)
        leave.set()
        thread.join()
    if not isinstance(profiled, torch.profiler.profile):
        raise NotApplicable("profile() is no torch.profiler.profile")
    ends = {name: end for name, _, end in _spans_of(profiled)}
    if "of this thread" not in ends or "behind it" not in ends:
        raise CheckFailed(f"the trace lacks a region of this thread (it has {', '.join(sorted(ends)) or 'none'})")
    told = "the region of this thread ends before the next one of this thread"
    require(ends["of this thread"] <= ends["behind it"], f"{told}, whatever another thread has entered")
    if "of another thread" in ends:
        require(ends["of another thread"] >= ends["of this thread"], "another thread's region ended with this one's")


def _spans_of(profiled: torch.profiler.profile) -> list[tuple[str, float, float]]:
    """Return name, start and end of what the host did; a trace may show a region a second time, on the device."""
    events = profiled.events() or ()  # type: ignore[no-untyped-call]
    host = [event for event in events if event.device_type.name == "CPU"]
    return [(event.name, event.time_range.start, event.time_range.end) for event in host]


@check("ACC-58", since="0.2", needs=["device"], after=("ACC-27",))
def regions_of_one_name(context: CheckContext) -> None:
    """A profile_region() inside of another one of the same name is a region of its own: the outer one lasts longer.

    Why: blocks that hold blocks; the trace shows the outer one too short, and the wrong part of the model is optimized.
    Fix: return a new context for each call.
    """
    accelerator, device = context.setup_accelerator()
    with accelerator.profile() as profiled, accelerator.profile_region("block"):
        with accelerator.profile_region("block"):
            torch.ones(4, device=device).sum()
        with accelerator.profile_region("behind the inner block"):  # torch merges an only child of the same name
            time.sleep(0.01)
    if not isinstance(profiled, torch.profiler.profile):
        raise NotApplicable("profile() is no torch.profiler.profile")
    spans = _spans_of(profiled)
    blocks = [(start, end) for name, start, end in spans if name == "block"]
    behind = [(start, end) for name, start, end in spans if name == "behind the inner block"]
    same("regions named 'block' in the trace of two", len(blocks), 2)
    same("regions behind the inner one", len(behind), 1)
    (outer_start, outer_end), (inner_start, inner_end) = sorted(blocks, key=lambda block: block[0] - block[1])
    start, end = behind[0]
    require(outer_start <= inner_start and outer_end >= inner_end, "two regions of one name don't nest")
    require(outer_end >= end, "the outer of two regions of one name ended before what it holds")
    require(inner_end <= start, "the inner of two regions of one name lasted longer than its body")
