"""CIO: a checkpoint is there completely or not at all, whatever interrupts a save or damages a file."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchhal.checkpoint import CheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import (
    MIB,
    checkpoint_files,
    file_sizes,
    load,
    numbered_checkpoint,
    save,
    small_checkpoint,
)


class PoisonPill:
    """Object that can't be pickled, which makes a save fail in the middle."""

    def __reduce__(self) -> Any:
        raise RuntimeError("this value can't be pickled")


@contextlib.contextmanager
def _previous_stays(context: CheckContext, io: CheckpointIO, path: Path) -> Iterator[None]:
    """Require that the block leaves the checkpoint at ``path`` as it was, and nothing else in its folder."""
    save(io, small_checkpoint(1), path)
    before = file_sizes(context.folder)
    yield
    require(io.exists(path), "the previous checkpoint is gone")
    same("the previous checkpoint", io.load_checkpoint(path), small_checkpoint(1))
    left = sorted(set(file_sizes(context.folder)) - set(before))
    require(not left, f"the failed save left {', '.join(left)}")


@check("CIO-06")
def poison_pill(context: CheckContext) -> None:
    """A save that fails in the middle raises, leaves the previous checkpoint of that name, and nothing beside it.

    Why: the save that fails is the one before the crash; with the previous one it takes the whole run.
    Fix: write to a temporary name in the same folder, rename at the end, remove it on an error.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    with _previous_stays(context, io, path):
        state = {"a": torch.ones(MIB), "pill": PoisonPill(), "z": torch.ones(MIB)}
        raises("the save of a value that can't be written", Exception, lambda: save(io, state, path))
    save(io, small_checkpoint(3), path)
    same("a save after the failed one", io.load_checkpoint(path), small_checkpoint(3))


@check("CIO-07", needs=["posix"])
def disk_full(context: CheckContext) -> None:
    """A save that finds the disk full raises CheckpointError, leaves the previous checkpoint, and nothing beside it.

    Why: full disks are common, and torch.save reports one as "enforce fail" or, over a plain file object, not at all.
    Fix: as for CIO-06; let the OSError of the write be the cause.
    """
    import resource

    io, path = context.create(), context.folder / "x.ckpt"
    with _previous_stays(context, io, path):
        # 8 MiB, which an IO that compresses finds no room for either
        state = {"large": torch.randn(2 * MIB, generator=torch.Generator().manual_seed(0))}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
        try:
            raises("the save to a full disk", CheckpointError, lambda: save(io, state, path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)


def _survives_kills(component: ComponentUnderTest, path: str, trials: int) -> None:
    """Kill forked processes during their saves, and compare the checkpoint that each one leaves."""
    io, generator = component.create(), random.Random(component.seed)
    save(io, numbered_checkpoint(0), path)
    io.teardown()
    for trial in range(1, trials + 1):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, wherever it is
            writer = component.create()
            start = time.perf_counter()
            save(writer, numbered_checkpoint(trial), path)
            # somewhere in one of the next saves, however fast this machine is
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, 3 * generator.random() * (time.perf_counter() - start)))
            while True:
                trial += 1000
                save(writer, numbered_checkpoint(trial), path)
        generator.random()  # what the child has drawn from its copy
        os.waitpid(child, 0)
        for found in [path, *io.list_checkpoints(os.path.dirname(path))]:
            require(io.exists(found), f"after a kill {found!r} doesn't exist")
            loaded = load(f"{found!r}, which is listed after a kill,", io, found)
            same(f"{found!r} after a kill", loaded, numbered_checkpoint(loaded["version"]))


@check("CIO-08", features=["atomic"], needs=["posix"])
def killed(context: CheckContext) -> None:
    """A process that is killed during a save leaves the old checkpoint or the new one, whole.

    Why: the scheduler's SIGKILL comes when it comes.
    Fix: fsync the temporary file, then rename; never truncate what is there.
    """
    context.run_in_subprocess(_survives_kills, context.component, str(context.folder / "x.ckpt"), 8, timeout=90)


@check("CIO-09", features=["atomic"])
def concurrent_reader(context: CheckContext) -> None:
    """A reader that loads while another process or thread saves over the same name always gets one whole checkpoint.

    Two processes may save over it at once: the checkpoint is then one of theirs.

    Why: an evaluation that polls for the newest checkpoint dies in the moment when there is none.
    Fix: rename over it; never remove first.
    """
    io, path, done = context.create(), context.folder / "x.ckpt", threading.Event()
    save(io, numbered_checkpoint(0), path)
    problems: list[BaseException] = []

    def write() -> None:
        writer, version = context.create(), 0
        try:
            while not done.is_set():
                version += 1
                save(writer, numbered_checkpoint(version), path)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(40):
            loaded = load("a checkpoint during another save", io, path)
            same("a checkpoint read during a save", loaded, numbered_checkpoint(loaded["version"]))
    finally:
        done.set()
        thread.join()
    require(not problems, f"a save failed: {problems}")
    if os.name == "posix" and "sharded" not in context.component.declared:  # whose ranks save together
        told = context.run_on_ranks(2, _save_and_load, context.component, str(path), 25, timeout=90)
        require(not any(told), f"two processes saved over one name: {next(filter(None, told), None)}")
        loaded = load("the checkpoint that two processes have saved over", context.create(), path)
        same("the checkpoint that two processes have saved over", loaded, numbered_checkpoint(loaded["version"]))


def _save_and_load(component: ComponentUnderTest, path: str, times: int) -> str:
    """Save and load ``times`` times, as another process does; return the first problem."""
    io, rank = component.create(), int(os.environ["RANK"])
    try:
        for number in range(times):
            time.sleep(-time.time() % 0.02)  # the saves of both begin together
            save(io, numbered_checkpoint(100 * (rank + 1) + number), path)
            loaded = load("a checkpoint that two processes save over", io, path)
            same("a checkpoint that two processes save over", loaded, numbered_checkpoint(loaded["version"]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        io.teardown()
    return ""


@check("CIO-10", needs=["posix"])
def temporary_file(context: CheckContext) -> None:
    """Temporary files lie in the target's own folder, and the checkpoint's permissions follow the umask.

    Why: a rename from /tmp fails between file systems, and mkstemp's 0600 makes a team's checkpoint unreadable.
    Fix: open a new name in the folder with mode 0o666.
    """
    path = context.folder / "sub" / "x.ckpt"
    path.parent.mkdir()
    context.restart_subprocess()
    moves, opened, modes = context.run_in_subprocess(_watch_save, context.component, str(path))
    context.restart_subprocess()
    inside = os.path.realpath(path.parent) + os.sep
    for source, target in moves:
        if os.path.realpath(target).startswith(inside):
            same(f"whether {source!r} was beside {target!r}", os.path.realpath(source).startswith(inside), True)
    strays = sorted({name for name in opened if not os.path.realpath(name).startswith(inside)})
    require(not strays, f"files outside of the target's folder were written: {', '.join(strays)}")
    for file, mode in modes.items():
        same(f"permissions of {os.path.basename(file)} under umask 027", oct(mode), oct(0o640))


def _watch_save(component: ComponentUnderTest, path: str) -> tuple[list[tuple[str, str]], list[str], dict[str, int]]:
    moves, opened = [], []
    listening = False

    def hook(event: str, arguments: Any) -> None:
        if not listening:
            return
        if event in ("os.rename", "shutil.move"):
            moves.append((os.fsdecode(arguments[0]), os.fsdecode(arguments[1])))
        elif event == "open" and isinstance(arguments[0], str | bytes):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR) if isinstance(arguments[2], int) else 0
            name = os.fsdecode(arguments[0])
            if writes and not name.startswith(("/dev/", "/proc/")):
                opened.append(name)

    io = component.create()
    save(io, small_checkpoint(), os.path.join(os.path.dirname(path), "warm.ckpt"))  # imports, caches
    sys.addaudithook(hook)
    before = os.umask(0o027)
    listening = True
    try:
        save(io, small_checkpoint(), path)
    finally:
        listening = False
        os.umask(before)
    return moves, opened, {str(file): stat.S_IMODE(file.stat().st_mode) for file in checkpoint_files(Path(path))}


@check("CIO-12")
def damage(context: CheckContext) -> None:
    """A missing checkpoint is a FileNotFoundError with its path, a damaged one a CheckpointError with it.

    A damaged one is cut off, empty or garbage.

    Why: "invalid load key" or a hang doesn't tell a user which of the files to delete.
    Fix: catch what the reader raises and raise CheckpointCorruptError from it, with the path.
    """
    io, path = context.create(), context.folder / "damaged.ckpt"
    raises("loading what isn't there", FileNotFoundError, lambda: io.load_checkpoint(path), "damaged.ckpt")
    require(not io.exists(path), "exists() of a missing checkpoint is true")
    save(io, {**small_checkpoint(), "large": torch.ones(20_000)}, path)
    largest = max(checkpoint_files(path), key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    for what, data in (
        ("half of it", whole[: len(whole) // 2]), ("all but a byte", whole[:-1]), ("nothing", b""),
        ("garbage", random.Random(0).randbytes(len(whole))), ("text", b"this is no checkpoint"),
    ):  # fmt: skip
        largest.write_bytes(data)
        raises(f"loading {what}", CheckpointError, lambda: io.load_checkpoint(path), "damaged.ckpt")
    other = context.folder / "stray.ckpt"
    other.write_bytes(b"\0" * 100)
    raises("loading a file of zeros", CheckpointError, lambda: io.load_checkpoint(other), "stray.ckpt")


@check("CIO-16", needs=["posix"])
def completed_only(context: CheckContext) -> None:
    """exists() and list_checkpoints() see completed checkpoints alone, also after a save that was killed.

    The list is in the order of the saves.

    Why: an automatic resume takes the newest; a partial one ends the job that was to be rescued.
    Fix: give temporary names a form that the listing knows, and look for what only a completed save writes.
    """
    io = context.create()
    same("the checkpoints of a missing folder", io.list_checkpoints(context.folder / "nowhere"), [])
    names = ["b.ckpt", "a.ckpt", "c.ckpt"]
    for name in [*names, "b.ckpt"]:
        save(io, small_checkpoint(), context.folder / "runs" / name)
        time.sleep(0.01)
    listed = [os.path.basename(str(path)) for path in io.list_checkpoints(context.folder / "runs")]
    same("the checkpoints by the time of their saves", listed, ["a.ckpt", "c.ckpt", "b.ckpt"])
    (context.folder / "killed").mkdir()
    context.run_in_subprocess(
        _survives_kills, context.component, str(context.folder / "killed" / "x.ckpt"), 3, timeout=90
    )


@check("CIO-29", features=["checksum"])
def flipped_bit(context: CheckContext) -> None:
    """One flipped bit anywhere in a checkpoint's files is refused by a CheckpointCorruptError with the path.

    Why: torch's zip reader checks nothing: damaged weights train on.
    Fix: store a checksum over everything, and verify it before a value is used.
    """
    io, path, generator = context.create(), context.folder / "x.ckpt", random.Random(context.component.seed)
    save(io, {**small_checkpoint(), "t": torch.randn(500, generator=context.generator())}, path)
    for file in checkpoint_files(path):
        whole = file.read_bytes()
        places = {0, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(40))}
        for place in sorted(places):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            what = f"loading with a bit flipped in byte {place} of {len(whole)} of {file.name}"
            raises(what, CheckpointCorruptError, lambda: io.load_checkpoint(path), path.name)
        file.write_bytes(whole)
