"""CIO: a checkpoint is there completely or not at all, and comes back as what was saved."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchhal.checkpoint import CheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._rank_context import RankContext

MIB = 1 << 20
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.bool,
)  # fmt: skip


def save(io: CheckpointIO, state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Save, and return when it is durable."""
    io.save_checkpoint(state, path)
    io.wait()


def load(what: str, io: CheckpointIO, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load what must be there."""
    try:
        return io.load_checkpoint(path)
    except Exception as error:
        raise CheckFailed(f"{what} can't be loaded ({type(error).__name__}: {error})") from error


def small(value: float = 1.0) -> dict[str, Any]:
    return {"weights": {"w": torch.full((64,), float(value)), "b": torch.arange(5)}, "step": int(value)}


def golden_state() -> dict[str, Any]:
    """What the golden files hold: whatever a release writes must load in the later ones."""
    base = torch.arange(24.0).reshape(4, 6)
    weights = {str(dtype).removeprefix("torch."): (base % 2).to(dtype) for dtype in DTYPES}
    return {"state_dict": collections.OrderedDict(weights), "shared": [base, base[1:3]], "epoch": 3, "none": None}


def _files(path: Path) -> list[Path]:
    """The files of a checkpoint: itself, or those in it."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _listing(folder: Path) -> dict[str, int]:
    return {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*"))}


@check("CIO-01")
def round_trip(bench: CheckContext) -> None:
    """Every dtype, 0-d, empty and strided tensors, nested containers, large integers, None and the state of an
    optimizer come back as they were, in type, value and order.

    Why: a resumed run differs in what was lost, and nobody sees where.
    Fix: write values, not their string forms; keep containers what they are.
    """
    generator = bench.generator()
    tensors = {str(dtype): (torch.randn(3, 4, generator=generator) * 40).to(dtype) for dtype in DTYPES}
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(3, 4, generator=generator)).sum().backward()
    optimizer.step()
    base = torch.randn(6, 8, generator=generator)
    state = {
        "tensors": tensors, "0-d": torch.tensor(2.5), "empty": torch.empty(0, 3), "strided": base[:, ::2],
        "transposed": base.t(), "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        "nest": [{"a": (1, [2.5, None, True])}, "text \u00e9 \U0001f600", b"bytes".hex()], "large": 2**80,
        "keys": {1: "one", "two": 2}, "ordered": collections.OrderedDict(b=1, a=2), "optimizer": optimizer.state_dict(),
        "model": model.state_dict(),
    }  # fmt: skip
    io, path = bench.make(), bench.folder / "all.ckpt"
    save(io, state, path)
    loaded = io.load_checkpoint(path)
    for name, value in state.items():
        require(name in loaded, f"{name!r} is lost")
        same(name, loaded[name], value)
    same("the keys", list(loaded), list(state))


@check("CIO-02")
def shared_memory(bench: CheckContext) -> None:
    """Tensors that share memory share it after a load, tied weights and views alike.

    Why: tied weights that come apart train apart, and a checkpoint of views is many times its size.
    Fix: write each memory once, and views as places in it.
    """
    base = torch.randn(8, 4, generator=bench.generator())
    state = {"embedding": base, "head": base, "rows": base[2:5]}
    io, path = bench.make(), bench.folder / "tied.ckpt"
    save(io, state, path)
    loaded = io.load_checkpoint(path)
    loaded["embedding"][2, 0] = 77.0
    same("a tied tensor after a write to the other", float(loaded["head"][2, 0]), 77.0)
    same("a view after a write to its base", float(loaded["rows"][0, 0]), 77.0)


@check("CIO-03")
def map_location(bench: CheckContext) -> None:
    """A load gives tensors on the CPU unless told otherwise, and takes map_location as a name, a device, a callable or
    a dict of names.

    Why: an ignored map_location puts every rank's checkpoint on the device of the rank that saved it.
    Fix: hand it on to torch.load, or move the tensors as it says.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"
    save(io, small(), path)
    same("device without map_location", io.load_checkpoint(path)["weights"]["w"].device.type, "cpu")
    places: list[Any] = ["meta", torch.device("meta"), lambda storage, location: storage, {"cpu": "cpu"}]
    for place, expected in zip(places, ("meta", "meta", "cpu", "cpu"), strict=True):
        got = io.load_checkpoint(path, map_location=place)["weights"]["w"].device.type
        same(f"device with map_location={place!r}", got, expected)


@check("CIO-04")
def input_untouched(bench: CheckContext) -> None:
    """A save leaves the checkpoint that it was given as it was: keys, values and objects.

    Why: a state dict is often the running model's; what a save pops from it is missing from the run.
    Fix: make a new dict for what the file holds beyond it.
    """
    state = {**small(), "list": [torch.ones(3)], "none": None}
    objects = {"w": state["weights"]["w"], "list": state["list"]}
    before = pickle.dumps(state)
    save(bench.make(), state, bench.folder / "x.ckpt")
    same("the checkpoint after the save", state, pickle.loads(before))
    require(state["weights"]["w"] is objects["w"] and state["list"] is objects["list"], "values were replaced")


@check("CIO-05")
def overwrite(bench: CheckContext) -> None:
    """A save over another checkpoint replaces all of it: nothing of a larger predecessor is left.

    Why: shards of the old run that the new one doesn't overwrite are loaded as its own.
    Fix: write beside it and rename, or empty the folder of what an earlier save wrote there.
    """
    io, path, fresh = bench.make(), bench.folder / "x.ckpt", bench.folder / "fresh.ckpt"
    large = {"weights": {f"layer{i}": torch.randn(500, generator=bench.generator()) for i in range(40)}, "extra": 1}
    save(io, large, path)
    save(io, small(2), path)
    same("the second checkpoint of that name", io.load_checkpoint(path), small(2))
    save(io, small(2), fresh)
    sizes = [sum(file.stat().st_size for file in _files(one)) for one in (path, fresh)]
    names = [[file.relative_to(one).as_posix() for file in _files(one)] for one in (path, fresh)]
    require(len(names[0]) == len(names[1]), f"files {names[0]}, a fresh save writes {names[1]}")
    require(sizes[0] <= 1.5 * sizes[1], f"{sizes[0]} bytes, a fresh save takes {sizes[1]}")


class PoisonPill:
    """Can't be written, which is noticed in the middle of a save."""

    def __reduce__(self) -> Any:
        raise RuntimeError("this value can't be pickled")


@contextlib.contextmanager
def _previous_stays(bench: CheckContext, io: CheckpointIO, path: Path) -> Iterator[None]:
    """The checkpoint at ``path`` is the same, and nothing else is in the folder, when the block ends."""
    save(io, small(1), path)
    before = _listing(bench.folder)
    yield
    require(io.exists(path), "the previous checkpoint is gone")
    same("the previous checkpoint", io.load_checkpoint(path), small(1))
    left = sorted(set(_listing(bench.folder)) - set(before))
    require(not left, f"the failed save left {', '.join(left)}")


@check("CIO-06")
def poison_pill(bench: CheckContext) -> None:
    """A save that fails in the middle raises, leaves the previous checkpoint of that name, and nothing beside it.

    Why: the save that fails is the one before the crash; with the previous one it takes the whole run.
    Fix: write to a temporary name in the same folder, rename at the end, remove it on an error.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"
    with _previous_stays(bench, io, path):
        state = {"a": torch.ones(MIB), "pill": PoisonPill(), "z": torch.ones(MIB)}
        raises("the save of a value that can't be written", Exception, lambda: save(io, state, path))
    save(io, small(3), path)
    same("a save after the failed one", io.load_checkpoint(path), small(3))


@check("CIO-07", needs=["posix"])
def disk_full(bench: CheckContext) -> None:
    """A save that finds the disk full raises CheckpointError, leaves the previous checkpoint, and nothing beside it.

    Why: full disks are common, and torch.save reports one as "enforce fail" or, over a plain file object, not at all.
    Fix: as for CIO-06; let the OSError of the write be the cause.
    """
    import resource

    io, path = bench.make(), bench.folder / "x.ckpt"
    with _previous_stays(bench, io, path):
        state = {"large": torch.ones(2 * MIB)}  # 8 MiB
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
        try:
            raises("the save to a full disk", CheckpointError, lambda: save(io, state, path))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)


def _version(number: int) -> dict[str, Any]:
    return {"version": number, "x": torch.full((MIB,), float(number)), "y": [torch.full((1000,), number)] * 3}


def _survives_kills(subject: ComponentUnderTest, path: str, trials: int) -> None:
    """Kill savers, children of this process, and look at what each has left."""
    io, generator = subject.create(), random.Random(subject.seed)
    save(io, _version(0), path)
    io.teardown()
    for trial in range(1, trials + 1):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, wherever it is
            writer = subject.create()
            start = time.perf_counter()
            save(writer, _version(trial), path)
            # somewhere in one of the next saves, however fast this machine is
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, 3 * generator.random() * (time.perf_counter() - start)))
            while True:
                trial += 1000
                save(writer, _version(trial), path)
        generator.random()  # what the child has drawn from its copy
        os.waitpid(child, 0)
        for found in [path, *io.list_checkpoints(os.path.dirname(path))]:
            require(io.exists(found), f"after a kill {found!r} doesn't exist")
            loaded = load(f"{found!r}, which is listed after a kill,", io, found)
            same(f"{found!r} after a kill", loaded, _version(loaded["version"]))


@check("CIO-08", features=["atomic"], needs=["posix"])
def killed(bench: CheckContext) -> None:
    """A process that is killed during a save leaves the old checkpoint or the new one, whole.

    Why: the scheduler's SIGKILL comes when it comes.
    Fix: fsync the temporary file, then rename; never truncate what is there.
    """
    bench.elsewhere(_survives_kills, bench.subject, str(bench.folder / "x.ckpt"), 8, timeout=90)


@check("CIO-09", features=["atomic"])
def concurrent_reader(bench: CheckContext) -> None:
    """A reader that loads while another process or thread saves over the same name always gets one whole checkpoint.

    Why: an evaluation that polls for the newest checkpoint dies in the moment when there is none.
    Fix: rename over it; never remove first.
    """
    io, path, done = bench.make(), bench.folder / "x.ckpt", threading.Event()
    save(io, _version(0), path)
    problems: list[BaseException] = []

    def write() -> None:
        writer, version = bench.make(), 0
        try:
            while not done.is_set():
                version += 1
                save(writer, _version(version), path)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(40):
            loaded = load("a checkpoint during another save", io, path)
            same("a checkpoint read during a save", loaded, _version(loaded["version"]))
    finally:
        done.set()
        thread.join()
    require(not problems, f"a save failed: {problems}")


@check("CIO-10", needs=["posix"])
def temporary_file(bench: CheckContext) -> None:
    """Temporary files lie in the target's own folder, and the checkpoint's permissions follow the umask.

    Why: a rename from /tmp fails between file systems, and mkstemp's 0600 makes a team's checkpoint unreadable.
    Fix: open a new name in the folder with mode 0o666.
    """
    path = bench.folder / "sub" / "x.ckpt"
    path.parent.mkdir()
    bench.fresh()
    moves, opened, modes = bench.elsewhere(_watch_save, bench.subject, str(path))
    bench.fresh()
    inside = os.path.realpath(path.parent) + os.sep
    for source, target in moves:
        if os.path.realpath(target).startswith(inside):
            same(f"whether {source!r} was beside {target!r}", os.path.realpath(source).startswith(inside), True)
    strays = sorted({name for name in opened if not os.path.realpath(name).startswith(inside)})
    require(not strays, f"files outside of the target's folder were written: {', '.join(strays)}")
    for file, mode in modes.items():
        same(f"permissions of {os.path.basename(file)} under umask 027", oct(mode), oct(0o640))


def _watch_save(subject: ComponentUnderTest, path: str) -> tuple[list[tuple[str, str]], list[str], dict[str, int]]:
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

    io = subject.create()
    save(io, small(), os.path.join(os.path.dirname(path), "warm.ckpt"))  # imports, caches
    sys.addaudithook(hook)
    before = os.umask(0o027)
    listening = True
    try:
        save(io, small(), path)
    finally:
        listening = False
        os.umask(before)
    return moves, opened, {str(file): stat.S_IMODE(file.stat().st_mode) for file in _files(Path(path))}


@check("CIO-11")
def paths(bench: CheckContext) -> None:
    """A path may be a str or a Path, relative, hold blanks, '%' and any letters, begin with a dot or end in .tmp, and
    lie in folders that don't exist yet.

    Why: metrics in file names bring all of these, and torch.save refuses some names itself.
    Fix: give torch.save an open file; make the folders.
    """
    io = bench.make()
    names = [
        "plain.ckpt",
        "with blanks.ckpt",
        "\u00fcn\u00ef\u4e2d.ckpt",
        "100%-val=0.5.ckpt",
        ".hidden",
        ".tmp",
        "x.tmp",
        "a/b/c/deep.ckpt",
    ]
    for name in names:
        for path in (bench.folder / name, str(bench.folder / f"s-{name.replace('/', '-')}")):
            try:
                save(io, small(), path)
                require(io.exists(path), f"{path!r} was saved and doesn't exist")
                same(f"the checkpoint {path!r}", io.load_checkpoint(path), small())
            except (OSError, RuntimeError, ValueError, CheckpointError) as error:
                raise CheckFailed(f"{path!r} can't be used: {type(error).__name__}: {error}") from error
    relative = os.path.relpath(bench.folder / "relative.ckpt")
    save(io, small(4), relative)
    same("the checkpoint of a relative path", io.load_checkpoint(bench.folder / "relative.ckpt"), small(4))


@check("CIO-12")
def damage(bench: CheckContext) -> None:
    """A missing checkpoint is a FileNotFoundError with its path; one that is cut off, empty or garbage is a
    CheckpointError with it.

    Why: "invalid load key" or a hang doesn't tell a user which of the files to delete.
    Fix: catch what the reader raises and raise CheckpointCorruptError from it, with the path.
    """
    io, path = bench.make(), bench.folder / "damaged.ckpt"
    raises("loading what isn't there", FileNotFoundError, lambda: io.load_checkpoint(path), "damaged.ckpt")
    require(not io.exists(path), "exists() of a missing checkpoint is true")
    save(io, {**small(), "large": torch.ones(20_000)}, path)
    largest = max(_files(path), key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    for what, data in (
        ("half of it", whole[: len(whole) // 2]), ("all but a byte", whole[:-1]), ("nothing", b""),
        ("garbage", random.Random(0).randbytes(len(whole))), ("text", b"this is no checkpoint"),
    ):  # fmt: skip
        largest.write_bytes(data)
        raises(f"loading {what}", CheckpointError, lambda: io.load_checkpoint(path), "damaged.ckpt")
    other = bench.folder / "stray.ckpt"
    other.write_bytes(b"\0" * 100)
    raises("loading a file of zeros", CheckpointError, lambda: io.load_checkpoint(other), "stray.ckpt")


@check("CIO-13")
def removal(bench: CheckContext) -> None:
    """remove_checkpoint deletes what a save wrote and nothing else; a missing checkpoint is no error; of a link the
    link alone is removed.

    Why: keeping the best k removes checkpoints all the time; one prefix match too many takes another run's.
    Fix: remove the one path; for a folder, what a save writes into it.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"
    neighbours = [bench.folder / name for name in ("x.ckpt.1", "x.ckpt-best", "ax.ckpt", "x")]
    for neighbour in neighbours:
        neighbour.write_text("mine")
    before = _listing(bench.folder)
    save(io, small(), path)
    io.remove_checkpoint(path)
    same("the folder after a save and its removal", _listing(bench.folder), before)
    io.remove_checkpoint(path)
    target, link = bench.folder / "kept.ckpt", bench.folder / "link.ckpt"
    save(io, small(), target)
    try:
        link.symlink_to(target, target_is_directory=target.is_dir())
    except OSError:  # a system without links
        return
    io.remove_checkpoint(link)
    require(not link.is_symlink(), "the link is still there")
    same("what the link pointed to", io.load_checkpoint(target), small())


class _Canary:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@check("CIO-14")
def hostile_file(bench: CheckContext) -> None:
    """A load runs nothing that a file says, unless it was told weights_only=False: in place of any file of a
    checkpoint stands a pickle that would create a file, and it doesn't.

    Why: checkpoints are downloaded, and a pickle is a program.
    Fix: torch.load(weights_only=True), or a format that holds no code.
    """
    io, path, canary = bench.make(), bench.folder / "x.ckpt", bench.folder / "canary"
    hostile = bench.folder / "hostile"
    torch.save({"weights": _Canary(str(canary))}, hostile)
    save(io, small(), path)
    for file in _files(path):
        whole = file.read_bytes()
        for data in (hostile.read_bytes(), pickle.dumps({"weights": _Canary(str(canary))})):
            file.write_bytes(data)
            with contextlib.suppress(Exception):
                io.load_checkpoint(path)
            with contextlib.suppress(Exception):
                io.list_checkpoints(bench.folder)
            with contextlib.suppress(Exception):
                io.open_checkpoint(path)
            require(not canary.exists(), f"a load ran what stands in {file.name}")
        file.write_bytes(whole)
    same("the checkpoint put back", io.load_checkpoint(path), small())


@check("CIO-15")
def unknown_options(bench: CheckContext) -> None:
    """A storage option or an argument that means nothing here is a TypeError that names it.

    Why: a misspelt option that is dropped writes to the wrong place with the wrong rights.
    Fix: take no **kwargs; check storage_options against what you use.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"

    def with_option() -> None:
        io.save_checkpoint(small(), path, storage_options={"no_such_option": 1})
        io.wait()

    raises("a storage option that nobody knows", TypeError, with_option, "no_such_option")
    unknown = {"colour": "red"}
    raises("an argument of a save", TypeError, lambda: io.save_checkpoint(small(), path, **unknown), "colour")
    raises("an argument of a load", TypeError, lambda: io.load_checkpoint(path, **unknown), "colour")


@check("CIO-16", needs=["posix"])
def completed_only(bench: CheckContext) -> None:
    """exists and list_checkpoints see completed checkpoints alone, also after a save that was killed; the list is in
    the order of the saves.

    Why: an automatic resume takes the newest; a partial one ends the job that was to be rescued.
    Fix: give temporary names a form that the listing knows, and look for what only a completed save writes.
    """
    io = bench.make()
    same("the checkpoints of a missing folder", io.list_checkpoints(bench.folder / "nowhere"), [])
    names = ["b.ckpt", "a.ckpt", "c.ckpt"]
    for name in [*names, "b.ckpt"]:
        save(io, small(), bench.folder / "runs" / name)
        time.sleep(0.01)
    listed = [os.path.basename(str(path)) for path in io.list_checkpoints(bench.folder / "runs")]
    same("the checkpoints by the time of their saves", listed, ["a.ckpt", "c.ckpt", "b.ckpt"])
    (bench.folder / "killed").mkdir()
    bench.elsewhere(_survives_kills, bench.subject, str(bench.folder / "killed" / "x.ckpt"), 3, timeout=90)


@check("CIO-17", features=["async"])
def snapshot(bench: CheckContext) -> None:
    """What changes after save_checkpoint has returned is not in the checkpoint.

    Why: training goes on while the save does; a mixture of two steps loads without an error.
    Fix: copy every value before returning.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"
    state: dict[str, Any] = {"w": torch.zeros(4 * MIB), "list": [1], "optimizer": {"step": torch.tensor(1)}}
    io.save_checkpoint(state, path)
    state["w"].add_(1)
    state["list"].append(2)
    state["optimizer"]["step"].add_(1)
    io.wait()
    expected = {"w": torch.zeros(4 * MIB), "list": [1], "optimizer": {"step": torch.tensor(1)}}
    same("what was saved before the change", io.load_checkpoint(path), expected)


@check("CIO-18", features=["async"])
def late_error(bench: CheckContext) -> None:
    """An error of a save is raised by the save, by wait() or by teardown(), once; the IO works afterwards, and again
    after teardown().

    Why: an exception lost in a thread means days of training without a checkpoint.
    Fix: keep the thread's exception and raise it at the next call.
    """
    io, blocked = bench.make(), bench.folder / "file"
    blocked.write_text("a file, so no folder")

    def fail() -> None:
        io.save_checkpoint(small(), blocked / "x.ckpt")
        io.wait()

    raises("a save into a file", Exception, fail)
    io.wait()
    for value in (1, 2):
        save(io, small(value), bench.folder / "x.ckpt")
        same("a later save", io.load_checkpoint(bench.folder / "x.ckpt"), small(value))
        io.teardown()

    def fail_at_teardown() -> None:
        io.save_checkpoint(small(), blocked / "x.ckpt")
        io.teardown()

    raises("a save into a file, then teardown()", Exception, fail_at_teardown)


@check("CIO-19", features=["async"])
def last_wins(bench: CheckContext) -> None:
    """Of several saves to one path the last one counts.

    Why: "last.ckpt" is written every time; an older save that finishes later takes the run back.
    Fix: one save in flight at a time, or one queue per path.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"
    io.save_checkpoint({"value": 1, "large": torch.ones(4 * MIB)}, path)
    io.save_checkpoint({"value": 2}, path)
    io.wait()
    same("the value after two saves", io.load_checkpoint(path)["value"], 2)


def _load_elsewhere(subject: ComponentUnderTest, path: str) -> Any:
    return pickle.dumps(subject.create().load_checkpoint(path))


@check("CIO-20", needs=["posix"])
def another_process(bench: CheckContext) -> None:
    """When a save has returned, or wait() has, another process reads the checkpoint.

    Why: what waits in this process's buffers is not there for the evaluation, nor after a crash.
    Fix: flush, fsync and close before returning.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"
    for value in (1, 2):
        save(io, small(value), path)
        loaded = pickle.loads(bench.elsewhere(_load_elsewhere, bench.subject, str(path)))
        same("what another process loads", loaded, small(value))


@check("CIO-21", features=["sharded"], worlds=(2,), timeout=90)
def all_ranks(rank: RankContext) -> None:
    """Through a strategy every rank takes part in a save to one path, all load the same, and paths that depend on the
    rank are an error on all of them.

    Why: a file name with the rank in it makes as many checkpoints as there are ranks, none of them whole.
    Fix: save through the process group; let the strategy compare the paths.
    """
    with rank.joined() as strategy:
        path = os.path.join(rank.folder, "x.ckpt")
        state = {"shared": torch.arange(10.0), "step": 3}
        strategy.save_checkpoint(state, path)
        strategy.wait_for_checkpoints()
        same("what each rank loads", strategy.load_checkpoint(path), state)
        own = os.path.join(rank.folder, f"rank{rank.rank}.ckpt")
        raises("a path for each rank", CheckpointError, lambda: strategy.save_checkpoint(state, own), "path")
        rank.gather("done")


def _save_shards(subject: ComponentUnderTest, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = RankContext(subject, os.path.dirname(path))
    with rank.joined() as strategy:
        mesh = init_device_mesh("cpu", (rank.size,))
        full = torch.arange(60.0).reshape(12, 5)
        strategy.save_checkpoint({"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 3}, path)
        strategy.wait_for_checkpoints()
        rank.gather("saved")


def _load_shards(subject: ComponentUnderTest, path: str) -> Any:
    rank = RankContext(subject, os.path.dirname(path))
    with rank.joined() as strategy:
        loaded = strategy.load_checkpoint(path)
        rank.gather("loaded")
        weights = loaded["w"]
        return (weights.full_tensor() if hasattr(weights, "full_tensor") else weights).tolist(), loaded["step"]


@check("CIO-22", features=["reshard"], needs=["posix"])
def another_number_of_ranks(bench: CheckContext) -> None:
    """Shards that three ranks wrote load in two, and in one.

    Why: a job that restarts on fewer devices must go on.
    Fix: store each shard with its place in the whole tensor.
    """
    path = str(bench.folder / "x.ckpt")
    bench.ranks(3, _save_shards, bench.subject, path, timeout=90)
    expected = torch.arange(60.0).reshape(12, 5).tolist(), 3
    for size in (2, 1):
        for got in bench.ranks(size, _load_shards, bench.subject, path, timeout=90):
            same(f"shards of 3 ranks loaded by {size}", got, expected)


@check("CIO-23", worlds=(2,), timeout=20)
def one_writer(rank: RankContext) -> None:
    """Without the feature ``sharded`` rank 0 alone writes, all ranks return, and all of them can load.

    Why: several writers of one file race, and a barrier inside of a save that one rank runs waits for ever.
    Fix: don't communicate in save_checkpoint; declare ``sharded`` if every rank has to take part.
    """
    if "sharded" in rank.subject.declared:
        raise NotApplicable("every rank writes its part")
    with rank.joined() as strategy:
        calls: list[str] = []
        io = strategy.checkpoint_io
        original = io.save_checkpoint

        def counted(*arguments: Any, **options: Any) -> None:
            calls.append("save")
            original(*arguments, **options)

        vars(io)["save_checkpoint"] = counted
        path = os.path.join(rank.folder, "x.ckpt")
        strategy.save_checkpoint(small(), path)
        strategy.wait_for_checkpoints()
        rank.gather("saved")
        same("how many times each rank wrote", rank.gather(len(calls)), [1, 0])
        same("what each rank loads", strategy.load_checkpoint(path), small())
        rank.gather("loaded")


@check("CIO-24", features=["fsspec"])
def url(bench: CheckContext) -> None:
    """A URL such as memory://run/x.ckpt can be saved to, loaded, listed and removed like a path.

    Why: code that joins paths or calls os.path.exists works until the run moves to an object store.
    Fix: go through fsspec for every path that holds "://".
    """
    io, root = bench.make(), f"memory://torchhal-conformance-{bench.folder.name}"
    path = f"{root}/x.ckpt"
    save(io, small(), path)
    require(io.exists(path), "a checkpoint at a URL was saved and doesn't exist")
    same("the checkpoint at a URL", io.load_checkpoint(path), small())
    listed = [str(found) for found in io.list_checkpoints(root)]
    require(len(listed) == 1 and listed[0].endswith("x.ckpt"), f"list_checkpoints of a URL gave {listed}")
    same("a listed URL", io.load_checkpoint(listed[0]), small())
    io.remove_checkpoint(path)
    require(not io.exists(path), "a checkpoint at a URL was removed and exists")
    raises("loading a missing URL", FileNotFoundError, lambda: io.load_checkpoint(path), "x.ckpt")


@check("CIO-25")
def golden_files(bench: CheckContext) -> None:
    """Checkpoints of golden_state() that earlier releases wrote load as what they were.

    Changed: the files are those of the folder given as ``golden=``, for only an author has them; without it the rule
    says nothing.

    Why: a format that changes quietly makes every archived run unreadable.
    Fix: keep one file of each release in the tests, and read what it holds.
    """
    if bench.subject.golden is None:
        raise NotApplicable("no files of earlier releases were given (golden=)")
    files = sorted(path for path in Path(bench.subject.golden).iterdir() if not path.name.startswith("."))
    require(files, f"{bench.subject.golden} is empty")
    for file in files:
        same(f"the golden file {file.name}", bench.make().load_checkpoint(file), golden_state())


@check("CIO-26")
def like_a_dict(bench: CheckContext) -> None:
    """Any sequence of saves, overwrites, removals and loads of a few names behaves as a dict would, also when half of
    it goes through another instance.

    Why: caches that a remove or another process's save doesn't reach, and names that collide after cleaning.
    Fix: keep nothing about files between calls.
    """
    ios = [bench.make(), bench.make()]
    folder, generator = bench.folder / "store", random.Random(bench.subject.seed)
    names = ["a.ckpt", "A.ckpt2", "a b", "a_b", "a.ckpt.bak"]
    model: dict[str, int] = {}
    done: list[str] = []
    for step in range(60):
        name, io = generator.choice(names), generator.choice(ios)
        action = generator.choice(["save", "save", "load", "remove", "list"])
        done.append(f"{action} {name!r}" if action != "list" else "list")
        told = f"after {', '.join(done[-6:])} (step {step}, seed {bench.subject.seed})"
        if action == "save":
            model[name] = step
            save(io, {"value": step, "t": torch.full((3,), step)}, folder / name)
        elif action == "remove":
            model.pop(name, None)
            io.remove_checkpoint(folder / name)
        elif action == "list":
            listed = sorted(os.path.basename(str(path)) for path in io.list_checkpoints(folder))
            same(f"the list {told}", listed, sorted(model))
        same(f"exists({name!r}) {told}", io.exists(folder / name), name in model)
        if name in model:
            same(f"{name!r} {told}", io.load_checkpoint(folder / name)["value"], model[name])
        else:
            raises(f"loading {name!r} {told}", FileNotFoundError, partial(io.load_checkpoint, folder / name))


def _growth(subject: ComponentUnderTest, path: str, size: int) -> int:
    import resource

    io = subject.create()
    save(io, small(), path)
    state = {"w": torch.ones(size, dtype=torch.uint8)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save(io, state, path)
    unit = 1 if sys.platform == "darwin" else 1024
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


@check("CIO-27", features=["streaming"], needs=["posix"])
def memory(bench: CheckContext) -> None:
    """A save needs at most 1.2 times the payload beside the payload itself.

    Why: a checkpoint that is first built in memory ends in the kernel killing the process, at the first save.
    Fix: write tensor by tensor.
    """
    size = 96 * MIB
    bench.fresh()
    growth = bench.elsewhere(_growth, bench.subject, str(bench.folder / "x.ckpt"), size)
    bench.fresh()
    require(growth < 1.2 * size, f"a save of {size >> 20} MiB took {growth >> 20} MiB more")


@check("CIO-28")
def teardown(bench: CheckContext) -> None:
    """teardown() flushes, may be called twice and before any use, and the instance works afterwards; one that was not
    used pickles.

    Why: teardown runs after errors too, and a Trainer fits several times.
    Fix: end what was started, and let the next save start it again.
    """
    io, path = bench.make(), bench.folder / "x.ckpt"
    io.teardown()
    try:
        io = pickle.loads(pickle.dumps(io))
    except Exception as error:
        raise CheckFailed(f"an unused instance doesn't pickle ({type(error).__name__}: {error})") from error
    io.save_checkpoint(small(1), path)
    io.teardown()
    io.teardown()
    same("what was saved before teardown()", load("what was saved before teardown()", bench.make(), path), small(1))
    save(io, small(2), path)
    same("what was saved after teardown()", io.load_checkpoint(path), small(2))
    io.teardown()


@check("CIO-29", features=["checksum"])
def flipped_bit(bench: CheckContext) -> None:
    """One flipped bit anywhere in a checkpoint's files is refused by a CheckpointCorruptError with the path.

    Why: torch's zip reader checks nothing: damaged weights train on.
    Fix: store a checksum over everything, and verify it before a value is used.
    """
    io, path, generator = bench.make(), bench.folder / "x.ckpt", random.Random(bench.subject.seed)
    save(io, {**small(), "t": torch.randn(500, generator=bench.generator())}, path)
    for file in _files(path):
        whole = file.read_bytes()
        places = {0, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(40))}
        for place in sorted(places):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            what = f"loading with a bit flipped in byte {place} of {len(whole)} of {file.name}"
            raises(what, CheckpointCorruptError, lambda: io.load_checkpoint(path), path.name)
        file.write_bytes(whole)
