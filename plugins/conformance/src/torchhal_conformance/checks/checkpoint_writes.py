"""CIO: what saves that were killed leave, what a save brings to the disk, and saves that find no room there."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torchhal.checkpoint import CheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError, ConfigurationError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import (
    MIB,
    checkpoint_files,
    file_sizes,
    load,
    save,
    small_checkpoint,
)
from torchhal_conformance.checks._open_files import open_files

_LARGE = 3 * MIB
"""Elements of a tensor whose save takes long enough to be met in the middle."""


def _stopped_saves(component: ComponentUnderTest, folder: str, locks: bool) -> tuple[list[str], list[str], bool]:
    """Kill one process in a save and stop another one, save once more, and let the stopped one go on.

    Returns:
        The problems; the files that the killed save left and that are still there; whether both were met in a save.
    """
    root, io, problems = Path(folder), component.create(), []
    refused = contextlib.nullcontext() if locks else _no_locks()
    with refused:
        save(io, small_checkpoint(1), root / "own.ckpt")
        dead, of_dead = _stop_in_a_save(component, root / "dead.ckpt")
        if dead:
            os.kill(dead, signal.SIGKILL)
            os.waitpid(dead, 0)
        live, of_live = _stop_in_a_save(component, root / "live.ckpt")
        try:
            for name in (*of_dead, *of_live):
                with contextlib.suppress(ConfigurationError):  # the name of a temporary file is no checkpoint's
                    if io.exists(root / name):
                        problems.append(f"exists() of {name}, which an unfinished save has left, is true")
            listed = [os.path.basename(str(path)) for path in io.list_checkpoints(root)]
            if listed != ["own.ckpt"]:
                problems.append(f"during a save the list is {listed}, expected ['own.ckpt']")
            (root / ".torchhal-tmp-of-mine").write_text("mine")
            opened = open_files()
            save(io, small_checkpoint(2), root / "next.ckpt")
            io.wait()
            if open_files() > opened:
                problems.append("a save that meets what another one has left keeps a file open")
            if not (root / ".torchhal-tmp-of-mine").exists():
                problems.append("a save has removed a file that no save has written")
        finally:
            if live:
                os.kill(live, signal.SIGCONT)
                status = os.waitpid(live, 0)[1]
        if live and (status or not io.exists(root / "live.ckpt")):
            problems.append("a save was disturbed by the save of another process in its folder")
        elif live:
            same("what the process saved that was stopped", float(io.load_checkpoint(root / "live.ckpt")["x"][-1]), 1.0)
        left = [name for name in of_dead if (root / name).exists()]
    return problems, left, bool(dead and live)


@contextlib.contextmanager
def _no_locks() -> Iterator[None]:
    """Let the block be on a file system that has no locks."""
    import fcntl

    def refuse(*arguments: Any) -> None:
        raise OSError(38, "Function not implemented")

    with mock.patch.object(fcntl, "flock", refuse):
        yield


def _stop_in_a_save(component: ComponentUnderTest, path: Path) -> tuple[int, list[str]]:
    """Return a forked process that is stopped in a save, with the names that it has made; 0 if it was too fast."""
    for by_itself in (True, False, False, False):
        before = set(os.listdir(path.parent))
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException), _stops_once() if by_itself else contextlib.nullcontext():
                save(component.create(), {"x": torch.ones(MIB if by_itself else _LARGE)}, path)
                os._exit(0)
            os._exit(1)
        stopped = _is_stopped(child) if by_itself else _stop(child, path.parent, before)
        made = set(os.listdir(path.parent)) - before
        if stopped and made and path.name not in made:
            return child, sorted(made)
        if stopped:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for name in made:
            (path.parent / name).unlink()
    return 0, []


@contextlib.contextmanager
def _stops_once() -> Iterator[None]:
    """Stop this process where it first brings a file to the disk, or renames one."""
    left = ["once"]

    def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if left:
                left.clear()
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(*arguments, **options)

        return call

    with mock.patch.multiple(os, fsync=stopping(os.fsync), replace=stopping(os.replace), rename=stopping(os.rename)):
        yield


def _is_stopped(child: int) -> bool:
    return os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])


def _stop(child: int, folder: Path, before: set[str]) -> bool:
    """Stop the process as soon as there is a new file; return False if it has ended."""
    while not set(os.listdir(folder)) - before:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
    os.kill(child, signal.SIGSTOP)
    return _is_stopped(child)


@check("CIO-54", since="0.2", needs=["posix"], after=("CIO-01", "CIO-16"))
def unfinished_saves(context: CheckContext) -> None:
    """An unfinished save is neither seen by exists() nor listed; what a killed one left the next save there removes.

    It removes nothing that a process still writes, and no file of the user's, with or without locks of the file
    system. It applies to an IO with ``atomic``.

    Why: each kill leaves a file of the checkpoint's size, until the disk is full; a sweep by age or by name alone takes
    the file of a job that saves beside it.
    Fix: torchhal.checkpoint.location_of(path).replacing(), or lock the temporary file and sweep those without a lock.
    """
    if not {"atomic"} <= context.component.declared or "sharded" in context.component.declared:
        raise NotApplicable("it isn't atomic, or its ranks save together")
    for locks in (True, False):
        folder = context.folder / ("locks" if locks else "no locks")
        folder.mkdir()
        problems, left, met = context.run_in_subprocess(
            _stopped_saves, context.component, str(folder), locks, timeout=90
        )
        told = "" if locks else ", without locks"
        require(not problems, f"{'; '.join(problems)}{told}")
        require(not left, f"a save leaves {', '.join(left)}, whose process was killed{told}")
        if not met:
            raise NotApplicable("its saves are done before another process sees a file of theirs")
        require(not _temporary(folder), f"{', '.join(_temporary(folder))} are left after all saves{told}")


def _temporary(folder: Path) -> list[str]:
    saved = ("own.ckpt", "next.ckpt", "live.ckpt", ".torchhal-tmp-of-mine")
    return [name for name in os.listdir(folder) if name not in saved]


@check("CIO-55", since="0.2", needs=["posix"], after=("CIO-01",))
def brought_to_disk(context: CheckContext) -> None:
    """A save brings the file to the disk before it renames it, and then the folders that name it.

    It applies to an IO with ``atomic`` that renames a file; new folders are brought to the disk, too, and links. An
    error of the disk is a CheckpointError; that a file system can't bring folders to the disk is none. The file's
    permissions are those that the umask leaves of 0666.

    Why: a rename may reach the disk before the data: after a power failure the newest checkpoint is an empty file.
    Fix: os.fsync of the file, os.replace, os.fsync of the folder; torchhal.checkpoint.location_of does all three.
    """
    if "atomic" not in context.component.declared:
        raise NotApplicable("it isn't atomic")
    io = context.create()
    save(io, small_checkpoint(), context.folder / "warm.ckpt")
    path = context.folder / "new" / "sub" / "x.ckpt"
    before = os.umask(0)
    try:
        events = _calls_of(io, path)
    finally:
        os.umask(before)
    moved = [(number, source) for number, (what, source, target) in enumerate(events) if target == str(path)]
    if not moved:
        raise NotApplicable("it renames no file, as far as Python sees")
    place, source = moved[-1]
    require(("fsync", source, "") in events[:place], f"{source} was renamed before it was brought to the disk")
    told = "was not brought to the disk after the rename"
    require(("fsync", str(path.parent), "") in events[place:], f"the folder of the checkpoint {told}")
    for folder in (context.folder, context.folder / "new"):
        require(
            ("fsync", str(folder), "") in events, f"{folder}, in which a folder was made, was not brought to the disk"
        )
    if path.is_file():
        same("permissions under umask 0", oct(stat.S_IMODE(path.stat().st_mode)), oct(0o666))
    _links_and_errors(context, io, path)


def _links_and_errors(context: CheckContext, io: CheckpointIO, path: Path) -> None:
    """Check links, a file system whose folders can't be brought to the disk, and one that reports an error."""
    if "sharded" not in context.component.declared:
        made: list[bool] = []
        target = path.parent / "link.ckpt"
        events = _events_of(lambda: made.append(io.link_checkpoint(path, target)))
        if made == [True]:
            last = max(number for number, one in enumerate(events) if one[2] == str(target))
            told = "the folder of a link was not brought to the disk after it"
            require(("fsync", str(path.parent), "") in events[last:], told)
    original = os.fsync

    def fail(number: int, of_folders: bool) -> Any:
        def sync(fd: Any) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode) is of_folders:
                raise OSError(number, os.strerror(number))
            original(fd)

        return mock.patch.object(os, "fsync", sync)

    with fail(errno.EINVAL, True):  # as on some network file systems
        save(io, small_checkpoint(2), path)
    same("a checkpoint in a folder that can't be brought to the disk", io.load_checkpoint(path), small_checkpoint(2))
    for of_folders in (False, True):
        with fail(errno.EIO, of_folders):
            told = f"a save whose {'folder' if of_folders else 'file'} the disk refuses"
            raises(told, CheckpointError, lambda: save(io, small_checkpoint(3), path))
    found = io.load_checkpoint(path)["step"]
    require(found in (2, 3), f"the checkpoint after an error of the disk must be one of both (got step {found})")


def _calls_of(io: CheckpointIO, path: Path) -> list[tuple[str, str, str]]:
    return _events_of(lambda: save(io, small_checkpoint(), path))


def _events_of(call: Callable[[], Any]) -> list[tuple[str, str, str]]:
    """Return the calls by which files come to the disk: (name, file, new name)."""
    events: list[tuple[str, str, str]] = []
    originals = {name: getattr(os, name) for name in ("fsync", "fdatasync", "replace", "rename")}

    def synced(fd: Any) -> Any:
        number = fd if isinstance(fd, int) else fd.fileno()
        with contextlib.suppress(OSError):
            events.append(("fsync", os.readlink(f"/proc/self/fd/{number}"), ""))
        return originals["fsync"](fd)

    def moved(source: Any, target: Any, **options: Any) -> Any:
        events.append(("rename", os.path.abspath(os.fsdecode(source)), os.path.abspath(os.fsdecode(target))))
        return originals["replace"](source, target, **options)

    if not os.path.isdir("/proc/self/fd"):
        raise NotApplicable("this system doesn't say which file a descriptor is of")
    with mock.patch.multiple(os, fsync=synced, fdatasync=synced, replace=moved, rename=moved):
        call()
    return events


@check("CIO-56", since="0.2", after=("CIO-01", "CIO-12"))
def every_byte(context: CheckContext) -> None:
    """A checkpoint of which any byte is changed or missing is a CheckpointCorruptError; no value is returned.

    With something behind its end it is one too, or what was saved. It applies to an IO with ``checksum``.

    Why: the byte that no check sum holds is the one that the disk loses.
    Fix: compute the sum over all bytes, its own place apart, and compare it before a value is used.
    """
    if "checksum" not in context.component.declared:
        raise NotApplicable("it has no checksum")
    io, path, generator = context.create(), context.folder / "x.ckpt", random.Random(context.component.seed + 1)
    state = {**small_checkpoint(), "t": torch.arange(90.0)}
    save(io, state, path)
    for file in checkpoint_files(path):
        whole = file.read_bytes()
        size = len(whole)
        places = (
            range(size)
            if size <= 600
            else sorted({*range(40), *range(size - 160, size), *generator.sample(range(size), 300)})
        )
        changes = [
            (f"byte {at} of {size} changed", whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :]) for at in places
        ]
        changes += [
            (f"the first {at} bytes alone", whole[:at])
            for at in (0, 1, 3, 4, 5, 21, 22, size // 3, size - 22, size - 1)
        ]
        changes += [("a byte before it", b"P" + whole), ("its first half twice", whole[: size // 2] + whole)]
        for what, data in changes:
            file.write_bytes(data)
            raises(f"{file.name}: {what}", CheckpointCorruptError, lambda: io.load_checkpoint(path), path.name)
            with contextlib.suppress(CheckpointError):  # damage of a tensor may be found when it is read
                opened = io.open_checkpoint(path)
                same(f"the step of an opened checkpoint, {file.name}: {what}", opened.get("step"), state["step"])
        for what, data in (("a byte", b"0"), ("zeros", b"\0" * 30), ("its second half", whole[size // 2 :])):
            file.write_bytes(whole + data)
            with contextlib.suppress(CheckpointCorruptError):  # a format may have room for more behind its end
                same(f"{file.name} with {what} behind its end", io.load_checkpoint(path), state)
        file.write_bytes(whole)
    same("the checkpoint put back", io.load_checkpoint(path), state)


@check("CIO-57", since="0.2", needs=["posix"], after=("CIO-07",))
def no_room(context: CheckContext) -> None:
    """A save that finds no room, however early or late, is a CheckpointError whose cause is the OSError of the write.

    The checkpoint that was there stays, nothing is beside it, no file stays open, and a later save works.

    Why: "No space left on device" is what the user has to read, and a job that goes on must not lose descriptors.
    Fix: raise CheckpointError from the OSError; close the file in a finally, although closing writes and fails too.
    """
    import resource

    io, path = context.create(), context.folder / "x.ckpt"
    save(io, small_checkpoint(1), path)
    before, opened = file_sizes(context.folder), open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        large = {"x": torch.randn(MIB, generator=torch.Generator().manual_seed(0))}  # 4 MiB, compressed too
        half = max(file.stat().st_size for file in context.folder.rglob("*") if file.is_file()) // 2
        for limit, state in ((0, small_checkpoint(2)), (half, small_checkpoint(2)), (MIB, large)):
            told = f"a save into {limit} bytes"
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                save(io, state, path)
            except CheckpointError as error:
                causes = _causes(error)
            except Exception as error:
                raise CheckFailed(f"{told} must raise CheckpointError (got {type(error).__name__}: {error})") from error
            else:
                raise CheckFailed(f"{told} must raise CheckpointError (it returned)")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            system = [one for one in causes if isinstance(one, OSError) and one.errno]
            # what another rank has raised comes as text
            told_causes = f"{told}: the cause must be the OSError of the write (got {causes!r:.300})"
            require(system or "sharded" in context.component.declared, told_causes)
            same(f"the files after {told}", file_sizes(context.folder), before)
            same(f"the checkpoint after {told}", load(f"the checkpoint after {told}", io, path), small_checkpoint(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    io.teardown()
    require(open_files() <= opened, f"{open_files() - opened} files are open after three failed saves")
    save(io, small_checkpoint(3), path)
    same("a save after the failed ones", io.load_checkpoint(path), small_checkpoint(3))


def _causes(error: BaseException) -> list[BaseException]:
    """Return the errors that are chained to this one, and itself."""
    found = []
    one: BaseException | None = error
    while one is not None:
        found.append(one)
        one = one.__cause__
    return found


@check("CIO-59", since="0.2", after=("CIO-16",))
def clock_set_back(context: CheckContext) -> None:
    """The last saved checkpoint is the last of the list, also where the clock was set back, or stands still.

    So it is after a load of a checkpoint that another process has saved with a clock that is ahead.

    Why: a resume takes the last of the list: after an hour that comes twice it went on from the wrong one.
    Fix: torchhal.checkpoint.next_ns() in the file, and seen() with what is loaded; or the file's modification time.
    """
    io, folder = context.create(), context.folder / "run"
    names = ["c.ckpt", "a.ckpt", "d.ckpt", "b.ckpt"]
    now = time.time_ns()
    for name, clock in zip(names, (now + 10**9, now, now, now - 10**15), strict=True):
        with mock.patch.object(time, "time_ns", lambda clock=clock: clock):
            save(io, small_checkpoint(), folder / name)
        time.sleep(0.01)
    same("the list after the clock was set back", _names(io, folder), names)
    context.run_in_subprocess(_save_tomorrow, context.component, str(folder / "0.ckpt"))
    if _names(io, folder)[-1] == "0.ckpt":
        io.load_checkpoint(folder / "0.ckpt")
        save(io, small_checkpoint(), folder / "after.ckpt")
        same("the list after a load of a checkpoint of a process whose clock is ahead", _names(io, folder)[-2:],
             ["0.ckpt", "after.ckpt"])  # fmt: skip


def _names(io: CheckpointIO, folder: Path) -> list[str]:
    return [os.path.basename(str(path)) for path in io.list_checkpoints(folder)]


def _save_tomorrow(component: ComponentUnderTest, path: str) -> None:
    tomorrow = time.time_ns() + 86_400 * 10**9
    with mock.patch.object(time, "time_ns", lambda: tomorrow):
        save(component.create(), small_checkpoint(), path)
