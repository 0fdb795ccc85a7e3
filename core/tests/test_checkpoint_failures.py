"""Real failures of a save and of a file: full disks, kills, flipped bits. The old checkpoint or the new one, always."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from limits import scaled

from torchhal import Module, Trainer
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.checkpoint import _local_file as local_file
from torchhal.checkpoint import _temp_files as temp_files
from torchhal.checkpoint._crc import Crc32, combine, torch_describes_records
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal.trainer.callbacks._written_files import WrittenFiles

OLD, NEW = {"w": torch.zeros(100)}, {"w": torch.ones(1_000_000)}


@pytest.fixture
def io_() -> TorchCheckpointIO:
    return TorchCheckpointIO()


def run(code: str, *args: Any) -> subprocess.CompletedProcess[str]:
    code = "import os, sys, torch\nfrom torchhal.checkpoint import TorchCheckpointIO\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


class Poison:
    """Passes the look at the contents, raises in torch.save."""

    def __init__(self, error: type[BaseException], calls: int = 1) -> None:
        self.error, self.calls = error, calls

    def __reduce__(self) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise self.error("poison")
        return set, ([1],)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, MemoryError])
def test_error_during_save_keeps_old(io_: TorchCheckpointIO, tmp_path: Path, error: Any) -> None:
    """An error in mid-save leaves the old checkpoint."""
    io_.save_checkpoint(OLD, tmp_path / "x")
    raised = CheckpointError if issubclass(error, Exception) else error
    with pytest.raises(raised, match="poison"):
        io_.save_checkpoint({"w": torch.ones(5), "p": Poison(error)}, tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert torch.equal(io_.load_checkpoint(tmp_path / "x")["w"], OLD["w"])


def test_full_quota_keeps_old_checkpoint(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    """The error of a full quota names it, and the old checkpoint stays."""
    io_.save_checkpoint(OLD, tmp_path / "x")
    done = run(
        """
        import resource, signal
        from torchhal.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        state = {"w": torch.ones(1_000_000)}
        for limit in (0, 100, 3_000, 1_500_000):  # in the first write, between records, in a record
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                TorchCheckpointIO().save_checkpoint(state, sys.argv[1])
            except CheckpointError as error:
                assert "File too large" in str(error), error
                print(os.listdir(os.path.dirname(sys.argv[1])))
        """,
        tmp_path / "x",
    )
    assert done.stdout == "['x']\n" * 4
    assert done.stderr == ""
    assert torch.equal(io_.load_checkpoint(tmp_path / "x")["w"], OLD["w"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "torchhal-test", str(tmp_path / "disk")]
    try:
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("may not mount a small file system here")
    except FileNotFoundError:
        pytest.skip("no mount here")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_full_disk_keeps_old_checkpoint(io_: TorchCheckpointIO, small_disk: Path) -> None:
    """The error of a full disk names it, and the old checkpoint stays."""
    io_.save_checkpoint(OLD, small_disk / "x")
    for _ in range(3):  # no leftover fills the disk either
        with pytest.raises(
            CheckpointError, match=r"x' could not be saved \(OSError: .*No space left on device"
        ) as caught:
            io_.save_checkpoint(NEW, small_disk / "x")
        assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(small_disk) == ["x"]
    assert torch.equal(io_.load_checkpoint(small_disk / "x")["w"], OLD["w"])
    io_.save_checkpoint({"w": torch.ones(150_000)}, small_disk / "x")


def test_a_read_only_disk_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    files = WrittenFiles("run", "writer")
    with pytest.raises(CheckpointError, match=r"x' could not be saved \(OSError: .*Read-only file system"):
        files.claim(str(small_disk / "x"))


class Line(Module):
    def __init__(self, steps: list[int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps = steps

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps.append(batch_idx)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_read_only_disk_refused_before_training(small_disk: Path, tmp_path: Path) -> None:
    """A read-only disk is an error before the first step."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    steps: list[int] = []
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for folder, taken in ((small_disk / "new" / "run", False), (tmp_path / "new" / "run", True)):
        trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=ModelCheckpoint(folder), **quiet)
        with nullcontext() if taken else pytest.raises(CheckpointError, match=f"'{small_disk}' may not be written to"):
            trainer.fit(Line(steps), [torch.ones(2, 1)])
        assert bool(steps) == taken


def test_unwritable_folder_refused(io_: TorchCheckpointIO) -> None:
    """A folder that takes no file is an error."""
    for path in ("/proc/x.ckpt", "/proc/made/x.ckpt", "/dev/null/x.ckpt"):
        with pytest.raises(CheckpointError, match=r"x\.ckpt' could not be saved \(\w+Error: .*Errno"):
            io_.save_checkpoint(OLD, path)


def test_short_writes_are_completed(io_: TorchCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short write is not taken for a whole one."""
    write = local_file._FlowingFile.write
    monkeypatch.setattr(
        local_file._FlowingFile, "write", lambda self, data: write(self, data[: max(1, len(data) // 2)])
    )
    io_.save_checkpoint(NEW, tmp_path / "x")
    monkeypatch.setattr(local_file._FlowingFile, "write", lambda self, data: 0)
    with pytest.raises(CheckpointError, match="took 0 of"):
        io_.save_checkpoint(NEW, tmp_path / "y")
    assert torch.equal(io_.load_checkpoint(tmp_path / "x")["w"], NEW["w"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_of_the_disk_isnt_swallowed(
    io_: TorchCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    # No real disk fails on demand.
    io_.save_checkpoint(OLD, tmp_path / "x")

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            io_.save_checkpoint(NEW, tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert torch.equal(io_.load_checkpoint(tmp_path / "x")["w"], OLD["w"])


def test_the_order_of_the_steps(io_: TorchCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure can't be tried out here; that everything is on the disk before the name moves can."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        steps.append(f"fsync {'folder' if os.path.isdir(path) else 'file of ' + str(os.stat(path).st_size)}")
        fsync(fd)

    def spy_replace(source: str, target: str) -> None:
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    io_.save_checkpoint(OLD, tmp_path / "x")
    assert steps == [f"fsync file of {(tmp_path / 'x').stat().st_size}", "replace", "fsync folder"]


# -- kills and leftovers ------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, time, torch
from torchhal.checkpoint import TorchCheckpointIO

def save_for_ever():
    io, values = TorchCheckpointIO(), [torch.full((300_000,), float(i)) for i in range(4)]
    for i in range(10**9):
        io.save_checkpoint({"w": values[i % 4], "i": i}, sys.argv[1])

torch.set_num_threads(1)
began = time.monotonic()
for _ in range(3):
    TorchCheckpointIO().save_checkpoint({"w": torch.zeros(300_000), "i": 0}, sys.argv[1])
one = (time.monotonic() - began) / 3  # on this machine, with what else it does
for trial in range(40):
    child = os.fork()  # cheaper than 40 imports of torch
    if not child:
        save_for_ever()
    time.sleep(one * (0.5 + 0.15 * trial))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
    input()
"""


def test_kills_leave_the_old_or_the_new_one(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    path, left, seen = tmp_path / "run/x", 0, set()
    io_.save_checkpoint({"w": torch.zeros(3), "i": 0}, path)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        for _ in range(40):
            assert process.stdout.readline() == "killed\n"
            loaded = io_.load_checkpoint(path)
            assert loaded["w"].unique().tolist() == [loaded["i"] % 4]
            assert io_.list_checkpoints(path.parent) == [str(path)]
            left += len(os.listdir(path.parent)) > 1
            seen.add(loaded["i"])
            process.stdin.write("\n")
            process.stdin.flush()
    assert left > 5 and len(seen) > 2, "the kills must hit saves"
    io_.save_checkpoint(OLD, path)
    assert os.listdir(path.parent) == ["x"]


def test_only_abandoned_temporary_files_of_ours_are_swept(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    def temporary(machine: str, pid: int, number: int, age: float = 0) -> str:
        path = tmp_path / f".torchhal-tmp-{machine}-{pid}-{number:08x}"
        path.write_text("partial")
        os.utime(path, (time.time() - age,) * 2)
        return path.name

    dead = subprocess.Popen(["true"])
    dead.wait()
    here, day = temp_files.machine(), 24 * 3600
    swept = [temporary(here, dead.pid, 1), temporary(here, os.getpid(), 2), temporary("0" * 8, 1, 3, age=day + 60)]
    kept = [
        temporary("0" * 8, dead.pid, 4, age=day - 60),
        "x.tmp",
        ".torchhal-tmp-mine",
        f".torchhal-tmp-{here}-1-folder00",
    ]
    (tmp_path / "x.tmp").write_text("the user's")
    (tmp_path / ".torchhal-tmp-mine").write_text("the user's")
    (tmp_path / kept[-1]).mkdir()
    (tmp_path / "outside").write_text("the user's")
    link = f".torchhal-tmp-{here}-{dead.pid}-00000009"
    (tmp_path / link).symlink_to(tmp_path / "outside")
    with io_not_finished(tmp_path) as live:
        for name in [*swept, *kept, live]:
            assert not io_.list_checkpoints(tmp_path)
            if name.startswith(".torchhal-tmp-") and name not in kept[1:]:
                with pytest.raises(ValueError, match="temporary file"):
                    io_.exists(tmp_path / name)
        io_.save_checkpoint({}, tmp_path / "x")
        assert sorted(os.listdir(tmp_path)) == sorted([*kept, live, link, "outside", "x"])


class io_not_finished:
    """A save of another process that is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> str:
        code = """
            from torchhal.checkpoint._locate import location_of
            with location_of(sys.argv[1], {}).replacing() as file:
                print(next(n for n in os.listdir(os.path.dirname(sys.argv[1])) if str(os.getpid()) in n), flush=True)
                input()
        """
        code = "import os, sys\n" + textwrap.dedent(code)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, self.folder / "live"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def __exit__(self, *error: object) -> None:
        self.process.communicate("\n", timeout=60)
        assert (self.folder / "live").exists(), "a sweep took a live save's file"


def test_leftovers_behind_urls_are_swept_too(io_: TorchCheckpointIO) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = temp_files.machine()
    names = [f".torchhal-tmp-{here}-{dead.pid}-00000001", f".torchhal-tmp-{here}-{os.getpid()}-00000002"]
    names.append(f".torchhal-tmp-00000000-{dead.pid}-00000003")
    for name in names:
        fs.pipe_file(f"/sweep/{name}", b"partial")
    io_.save_checkpoint({}, "memory://sweep/x")
    assert sorted(fs.ls("/sweep", detail=False)) == [f"/sweep/{names[2]}", f"/sweep/{names[1]}", "/sweep/x"]
    assert io_.list_checkpoints("memory://sweep") == ["memory://sweep/x"]


def test_a_reader_never_meets_a_gap(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "x"
    io_.save_checkpoint({"w": torch.zeros(100_000), "i": 0}, path)
    stop = threading.Event()
    failures: list[BaseException] = []

    def overwrite() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                TorchCheckpointIO().save_checkpoint({"w": torch.full((100_000,), float(number)), "i": number}, path)
            except BaseException as error:
                failures.append(error)
                return

    writers = [threading.Thread(target=overwrite) for _ in range(2)]
    for writer in writers:
        writer.start()
    seen = set()
    start = time.monotonic()
    while (waited := time.monotonic() - start) < 1.5 or (len(seen) <= 5 and waited < scaled(30)):
        assert io_.exists(path)
        loaded = io_.load_checkpoint(path)
        assert loaded["w"].unique().tolist() == [loaded["i"]]
        seen.add(loaded["i"])
    stop.set()
    for writer in writers:
        writer.join()
    assert not failures and len(seen) > 5
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_follows_the_umask(io_: TorchCheckpointIO, tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        io_.save_checkpoint({}, tmp_path / "x")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(io_: TorchCheckpointIO, tmp_path: Path) -> tuple[Path, bytes]:
    io_.save_checkpoint({"w": torch.arange(40.0), "n": 1}, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt", (tmp_path / "x.ckpt").read_bytes()


def test_every_flipped_bit_is_found(io_: TorchCheckpointIO, small: tuple[Path, bytes]) -> None:
    path, data = small
    for position in range(len(data)):
        flipped = bytearray(data)
        for bit in range(8) if position > len(data) - 100 else (position % 8,):
            flipped[position] = data[position] ^ (1 << bit)
            path.write_bytes(flipped)
            with pytest.raises(CheckpointCorruptError, match=r"x\.ckpt"):
                io_.load_checkpoint(path)
    path.write_bytes(data)
    io_.load_checkpoint(path)


def test_every_cut_is_found(io_: TorchCheckpointIO, small: tuple[Path, bytes]) -> None:
    path, data = small
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert not io_.exists(path)
        with pytest.raises(CheckpointCorruptError, match=r"x\.ckpt"):
            io_.load_checkpoint(path)


@pytest.mark.parametrize("more", [b"\0", b"x" * 1000, b"PK\x05\x06" + b"\0" * 18, "twice"])
def test_whatever_follows_the_end_is_found(io_: TorchCheckpointIO, small: tuple[Path, bytes], more: Any) -> None:
    path, data = small
    path.write_bytes(data + (data[100:] if more == "twice" else more))
    with pytest.raises(CheckpointCorruptError, match=r"x\.ckpt"):
        io_.load_checkpoint(path)


def test_bit_flips_in_plain_torch_file(io_: TorchCheckpointIO, tmp_path: Path) -> None:
    """Flipped bits in a file of plain torch never change weights."""
    path, state = tmp_path / "x.pt", {"w": torch.arange(40.0), "v": torch.arange(40.0) + 100}
    torch.save(state, path)
    data, refused = path.read_bytes(), 0
    for position in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        try:
            loaded = io_.load_checkpoint(path)
        except CheckpointError:
            refused += 1
        else:  # in padding, a time stamp, ...
            assert list(loaded) == list(state) and all(torch.equal(loaded[k], state[k]) for k in state), position
    assert refused > 0.1 * len(data)


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"", b"x", b"PK\x03\x04", os.urandom(10_000), b"\0" * 10_000, b"PK\x05\x06" + b"\0" * 18, b"\x80\x02."),
        *("zip", "compressed", "legacy", "own zip"),
    ],
    ids=[*"1234567", "zip", "compressed", "legacy", "own zip"],
)
def test_garbage_is_refused(io_: TorchCheckpointIO, tmp_path: Path, garbage: Any) -> None:
    import zipfile

    path = tmp_path / "x.ckpt"
    if garbage == "legacy":
        torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    elif isinstance(garbage, str):
        with zipfile.ZipFile(
            path, "w", zipfile.ZIP_DEFLATED if garbage == "compressed" else zipfile.ZIP_STORED
        ) as file:
            file.writestr("x/data.pkl" if garbage != "zip" else "letter.xml", "not a pickle" * 100)
            file.writestr("x/version", "3\n")
    else:
        path.write_bytes(garbage)
    with pytest.raises(CheckpointCorruptError, match=r"x\.ckpt"):
        io_.load_checkpoint(path)


def test_combined_checksum() -> None:
    """The checksum combined of two parts is that of the whole."""
    for length in (0, 1, 2, 100, 70_001):
        first, second = os.urandom(333), os.urandom(length)
        assert combine(zlib.crc32(first), zlib.crc32(second), length) == zlib.crc32(first + second)


@pytest.mark.parametrize("crc32", [True, False])
def test_the_seal_holds_however_torch_is_set(io_: TorchCheckpointIO, tmp_path: Path, crc32: bool) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc32)
    try:
        assert torch_describes_records() is crc32
        io_.save_checkpoint(NEW, tmp_path / "x")
        assert torch.equal(io_.load_checkpoint(tmp_path / "x")["w"], NEW["w"])
    finally:
        torch.serialization.set_crc32_options(before)


def test_a_torch_that_writes_otherwise_is_noticed() -> None:
    total = Crc32(trust_descriptors=True, large=10)
    total.update(memoryview(b"x" * 20))
    with pytest.raises(CheckpointError, match="record's checksum"):
        total.update(memoryview(b"PK\x07\x08" + b"\0" * 12))


# -- the whole, and its cost ----------------------------------------------------------------------------------------


class Disk(RuleBasedStateMachine):
    """TorchCheckpointIO against a dict."""

    root, count = "", 0
    names = st.sampled_from(["a", "b.ckpt", ".c", "sub/d", "ü %"])

    @initialize(url=st.booleans())
    def start(self, url: bool) -> None:
        Disk.count += 1
        self.folder = f"memory://machine/{Disk.count}" if url else f"{Disk.root}/{Disk.count}"
        self.io, self.model, self.order = TorchCheckpointIO(), dict[str, dict[str, Any]](), list[str]()

    @rule(name=names, size=st.sampled_from([0, 1, 3000]), value=st.integers(0, 9))
    def save(self, name: str, size: int, value: int) -> None:
        self.model[name] = {"w": torch.full((size,), value), "extra": [value] * value}
        self.io.save_checkpoint(self.model[name], f"{self.folder}/{name}")
        self.order = [*(n for n in self.order if n != name), name]

    @rule(name=names)
    def fail(self, name: str) -> None:
        with pytest.raises(CheckpointError):
            self.io.save_checkpoint({"p": Poison(ValueError)}, f"{self.folder}/{name}")

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.io.remove_checkpoint(f"{self.folder}/{name}")
        self.model.pop(name, None)
        self.order = [n for n in self.order if n != name]

    @rule(name=names)
    def load(self, name: str) -> None:
        assert self.io.exists(f"{self.folder}/{name}") == (name in self.model)
        if name not in self.model:
            with pytest.raises(FileNotFoundError):
                self.io.load_checkpoint(f"{self.folder}/{name}")
        else:
            loaded = self.io.load_checkpoint(f"{self.folder}/{name}")
            assert torch.equal(loaded["w"], self.model[name]["w"])
            assert loaded["extra"] == self.model[name]["extra"]

    @invariant()
    def listed(self) -> None:
        for sub in ("", "/sub"):
            here = [n for n in self.order if ("/" in n) == bool(sub)]
            assert self.io.list_checkpoints(f"{self.folder}{sub}") == [f"{self.folder}/{n}" for n in here]


def test_it_behaves_like_a_dict(tmp_path: Path) -> None:
    Disk.root = str(tmp_path)
    run_state_machine_as_test(Disk, settings=settings(max_examples=40, stateful_step_count=15, deadline=None))


def test_a_save_needs_no_second_copy(tmp_path: Path) -> None:
    done = run(
        """
        import resource
        io, peak = TorchCheckpointIO(), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        io.save_checkpoint({"w": torch.ones(3)}, sys.argv[1])
        state = {str(i): torch.ones(5_000_000) for i in range(5)}
        state["view"] = state.pop("0")[:4_000_000]
        before = peak()
        io.save_checkpoint(state, sys.argv[1])
        print((peak() - before) / 100e6)
        """,
        tmp_path / "x",
    )
    assert float(done.stdout) < 0.2


def test_spawned_processes_may_save_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_save_some, args=(str(tmp_path / "x"), rank)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert os.listdir(tmp_path) == ["x"]
    loaded = TorchCheckpointIO().load_checkpoint(tmp_path / "x")
    assert loaded["w"].unique().tolist() == [loaded["rank"]]


def _save_some(path: str, rank: int) -> None:
    for _ in range(10):
        TorchCheckpointIO().save_checkpoint({"w": torch.full((1000,), rank), "rank": rank}, path)
