"""Compiling on first use: one compiler call per library, whatever happens to the processes that ask for it."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from limits import scaled

from torchhal_simulator._build import TORCH_MINORS, check_torch, shared_library
from torchhal_simulator._build_errors import BuildError

REAL = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
FORK = multiprocessing.get_context("fork")  # real processes that need not import torch again

pytestmark = pytest.mark.skipif(REAL is None, reason="compiles C++: needs c++, g++ or clang++ on PATH")

SOURCE = """
#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""


class Compiler:
    """The real compiler behind a script in CXX that counts its calls and may do something first."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._calls = folder / "calls"
        self._script = folder / "compiler"
        self.path = str(self._script)
        self.set()

    def set(self, first: str = "", version: str = "test compiler 1") -> None:
        new = self._script.with_suffix(".new")
        new.write_text(
            f"#!/bin/sh\ncase \"$*\" in *--version) echo '{version}'; exit;; esac\n"
            f"echo $$ >> '{self._calls}'\n{first}\nexec {REAL} \"$@\"\n"
        )
        new.chmod(0o755)
        new.rename(self._script)

    @property
    def calls(self) -> list[int]:
        """The process ids of the calls so far, those for ``--version`` left out."""
        return [int(line) for line in self._calls.read_text().split()] if self._calls.exists() else []


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", compiler.path)
    return compiler


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHHAL_SIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "csrc")


def write_sources(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "device.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("#ifndef ANSWER\n#define ANSWER 42\n#endif\n")
    return folder


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


class Asked:
    """``shared_library`` in a process of its own."""

    def __init__(self, csrc: Path, source: str = "device.cpp") -> None:
        self._pipe, end = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self._ask, args=(end, csrc, source))
        self.process.start()
        end.close()

    @staticmethod
    def _ask(end: Any, csrc: Path, source: str) -> None:
        try:
            end.send(str(shared_library(source, csrc=csrc)))
        except BaseException as error:
            end.send(f"{type(error).__name__}: {error}")

    def outcome(self) -> str:
        """The path or the error; an empty text if the process died before."""
        try:
            return str(self._pipe.recv()) if self._pipe.poll(30) else "no answer"
        except EOFError:
            return ""
        finally:
            self._pipe.close()
            self.process.join(10)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + scaled(20)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int, session: int) -> bool:
    """Whether a process of the session of a compiler runs; its number may be another's by now, as they are soon used up
    where many tests start processes."""
    try:
        state, _, _, own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return state != "Z" and int(own) == session


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix == ".tmp")


# A library.


def test_builds_and_loads(cache: Path, csrc: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    (csrc / "device.cpp").write_text(
        "#include <c10/core/Device.h>\n"
        'extern "C" __attribute__((visibility("default"))) const char* name() {\n'
        "  static auto name = c10::Device(c10::kPrivateUse1, 3).str();\n"
        "  return name.c_str();\n"
        "}\n"
    )
    library = shared_library("device.cpp", csrc=csrc)
    name = ctypes.CDLL(str(library)).name
    name.restype = ctypes.c_char_p
    assert name().decode() == str(torch.device(torch._C._get_privateuse1_backend_name(), 3))
    assert library.is_relative_to(cache) and library.name == "device.so"
    assert [(r.name, r.levelno) for r in caplog.records] == [("torchhal_simulator", logging.WARNING)]
    assert f"(device.cpp) for torch {torch.__version__}: about half a minute, once" in caplog.text
    assert left_over(cache) == []


def test_what_is_not_exported_is_hidden(cache: Path, csrc: Path) -> None:
    (csrc / "device.cpp").write_text(SOURCE + 'extern "C" int inner() { return 1; }\n')
    library = ctypes.CDLL(str(shared_library("device.cpp", csrc=csrc)))
    assert hasattr(library, "answer") and not hasattr(library, "inner")


@pytest.mark.slow
def test_a_python_module(cache: Path, csrc: Path) -> None:
    (csrc / "module.cpp").write_text(
        "#include <pybind11/pybind11.h>\n#include <torch/csrc/Device.h>\n"
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n"
        '  m.def("add", [](int a, int b) { return a + b; });\n'
        '  m.def("is_device", [](pybind11::handle o) { return Py_TYPE(o.ptr()) == &THPDeviceType; });\n'
        "}\n"
    )
    library = shared_library("module.cpp", python=True, csrc=csrc)
    for name in ("module", "some_package.module"):
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.add(1, 2) == 3
        assert module.is_device(torch.device("cpu")) and not module.is_device(3)


def test_the_second_call_compiles_nothing(
    cache: Path, csrc: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.perf_counter()
    library = shared_library("device.cpp", csrc=csrc)
    compiling = time.perf_counter() - start
    caplog.clear()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert shared_library("device.cpp", csrc=csrc) == library
        times.append(time.perf_counter() - start)
    assert len(compiler.calls) == 1 and not caplog.records
    assert min(times) < compiling / 5


@pytest.mark.slow
def test_what_makes_another_entry(cache: Path, csrc: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shared_library("device.cpp", csrc=csrc)
    header = (csrc / "answer.h").read_text()
    (csrc / "answer.h").write_text("#define ANSWER 7\n")
    second = shared_library("device.cpp", csrc=csrc)
    (csrc / "answer.h").write_text(header)
    third = shared_library("device.cpp", defines=["ANSWER=8"], csrc=csrc)
    assert [answer(library) for library in (first, second, third)] == [42, 7, 8]

    seen = {first, second, third}
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.13.1+cpu")
        seen.add(shared_library("device.cpp", csrc=csrc))
    with monkeypatch.context() as other:
        other.setattr(torch.version, "git_version", "0" * 40)
        seen.add(shared_library("device.cpp", csrc=csrc))
    compiler.set(version="test compiler 2")
    seen.add(shared_library("device.cpp", csrc=csrc))
    assert len(seen) == len(compiler.calls) == 6

    compiler.set()
    assert shared_library("device.cpp", csrc=csrc) == first
    assert len(compiler.calls) == 6


def test_the_place_of_the_sources_is_not_part_of_the_key(
    cache: Path, csrc: Path, compiler: Compiler, tmp_path: Path
) -> None:
    shutil.copytree(csrc, tmp_path / "another environment")
    assert shared_library("device.cpp", csrc=csrc) == shared_library(
        "device.cpp", csrc=tmp_path / "another environment"
    )
    assert len(compiler.calls) == 1


def test_another_torch_minor_is_refused(cache: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch()
    monkeypatch.setattr(torch, "__version__", "2.99.0.dev20260101+cu130")
    with pytest.raises(BuildError) as caught:
        shared_library("device.cpp", csrc=csrc)
    message = str(caught.value)
    assert f"for torch {' and '.join(TORCH_MINORS)}," in message
    assert "torch 2.99.0.dev20260101+cu130 is installed" in message
    assert f"'torch=={TORCH_MINORS[-1]}.*'" in message and "made for torch 2.99" in message
    assert isinstance(caught.value, ImportError)
    assert not cache.exists()


def test_a_source_that_is_not_there(cache: Path, csrc: Path) -> None:
    with pytest.raises(BuildError, match=r"holds no other\.cpp.*install torchhal-simulator again"):
        shared_library("other.cpp", csrc=csrc)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed", "no digest"])
def test_a_damaged_library_is_built_again(cache: Path, csrc: Path, compiler: Compiler, damage: str) -> None:
    library = shared_library("device.cpp", csrc=csrc)
    size = library.stat().st_size
    if damage == "no digest":
        (library.parent / "sha256").unlink()
    else:
        data = library.read_bytes()
        changed = {"truncated": data[: size // 2], "emptied": b"", "changed": data[:-1] + bytes([data[-1] ^ 1])}[damage]
        library.write_bytes(changed)
    assert shared_library("device.cpp", csrc=csrc) == library
    assert library.stat().st_size == size and answer(library) == 42
    assert len(compiler.calls) == 2


# Several processes.


def test_of_two_processes_one_compiles(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set("sleep 0.5")
    both = [Asked(csrc), Asked(csrc)]
    outcomes = [asked.outcome() for asked in both]
    assert len(set(outcomes)) == 1 and answer(Path(outcomes[0])) == 42
    assert len(compiler.calls) == 1


def test_a_failure_reaches_all_who_wait_and_nobody_later(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set("sleep 1.5; echo 'internal error: out of ideas' >&2; exit 3")
    all_four = [Asked(csrc) for _ in range(4)]
    outcomes = {asked.outcome() for asked in all_four}
    assert len(outcomes) == 1
    assert "BuildError: the C++ compiler could not compile device.cpp" in (message := outcomes.pop())
    assert "(it ended with status 3)" in message and "internal error: out of ideas" in message
    assert len(compiler.calls) == 1

    compiler.set("echo 'another error' >&2; exit 3")
    with pytest.raises(BuildError, match="another error"):
        shared_library("device.cpp", csrc=csrc)
    compiler.set()
    assert answer(shared_library("device.cpp", csrc=csrc)) == 42
    assert left_over(cache) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_builder_frees_the_next_one(cache: Path, csrc: Path, compiler: Compiler, number: int) -> None:
    compiler.set("sleep 30")
    builder = Asked(csrc)
    wait_for(lambda: compiler.calls)
    compiler.set()
    waiting = Asked(csrc)
    time.sleep(0.2)
    assert len(left_over(cache)) == 1 and waiting.process.is_alive()
    assert builder.process.pid is not None
    os.kill(builder.process.pid, number)
    try:
        assert builder.outcome() == ""
        assert answer(Path(waiting.outcome())) == 42
        assert len(compiler.calls) == 2
        assert left_over(cache) == []
    finally:
        os.killpg(compiler.calls[0], signal.SIGKILL)  # what a killed builder can't end


def test_an_orphaned_compiler_leaves_nothing(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set("sleep 1")
    builder = Asked(csrc)
    wait_for(lambda: compiler.calls)
    builder.process.kill()
    builder.outcome()
    compiler.set()
    library = shared_library("device.cpp", csrc=csrc)
    orphan = compiler.calls[0]
    wait_for(lambda: not runs(orphan, orphan))
    assert left_over(cache) == [] and answer(library) == 42
    assert sorted(path.name for path in library.parent.iterdir()) == ["device.so", "sha256"]


@pytest.mark.slow
def test_an_interrupted_builder_ends_its_compiler(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set("sleep 30 & echo $! >> $(dirname $0)/calls; wait")
    builder = Asked(csrc)
    wait_for(lambda: len(compiler.calls) == 2)
    assert builder.process.pid is not None
    for _ in range(3):  # Python loses an interrupt that comes in a callback of the garbage collector
        os.kill(builder.process.pid, signal.SIGINT)
        builder.process.join(scaled(5))
        if not builder.process.is_alive():
            break
    assert builder.outcome().startswith("KeyboardInterrupt")
    wait_for(lambda: not any(runs(pid, compiler.calls[0]) for pid in compiler.calls))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_compiler_that_hangs_is_ended(
    cache: Path, csrc: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchhal_simulator._compiler.COMPILE_LIMIT", 0.5)
    compiler.set("sleep 30 & echo $! >> $(dirname $0)/calls; wait")
    with pytest.raises(BuildError, match=r"compiling device\.cpp took longer than .* minutes and was ended"):
        shared_library("device.cpp", csrc=csrc)
    wait_for(lambda: not any(runs(pid, compiler.calls[0]) for pid in compiler.calls))
    assert left_over(cache) == []


def test_a_builder_that_is_stopped_is_not_waited_for_for_ever(
    cache: Path, csrc: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchhal_simulator._build_cache.WAIT_LIMIT", 0.5)
    compiler.set("sleep 1")
    builder = Asked(csrc)
    wait_for(lambda: compiler.calls)
    assert builder.process.pid is not None
    os.kill(builder.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BuildError, match=r"another process has been compiling .* end the one that holds .*\.lock"):
            shared_library("device.cpp", csrc=csrc)
    finally:
        os.kill(builder.process.pid, signal.SIGCONT)
    assert answer(Path(builder.outcome())) == 42


def test_sources_that_change_under_the_compiler(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set(f"echo '// edited' >> '{csrc}/answer.h'")
    with pytest.raises(BuildError, match=r"changed while device\.cpp was compiled: run it again"):
        shared_library("device.cpp", csrc=csrc)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# The compiler.


def test_no_compiler(cache: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as bare:
        bare.setenv("PATH", str(tmp_path))
        with pytest.raises(BuildError, match=r"no C\+\+ compiler is on PATH .* apt install g\+\+"):
            shared_library("device.cpp", csrc=csrc)
    library = shared_library("device.cpp", csrc=csrc)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shared_library("device.cpp", csrc=csrc) == library, "a ready library needs no compiler"


@pytest.mark.parametrize("asked", ["no-such-compiler -O3", "g++ 'an open quote"])
def test_a_cxx_that_is_no_program(cache: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("CXX", asked)
    with pytest.raises(BuildError) as caught:
        shared_library("device.cpp", csrc=csrc)
    assert str(caught.value).startswith(f"CXX={asked!r} names no program that can be run: name a C++ compiler in CXX")


def test_a_cxx_that_can_not_be_run(cache: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cxx").write_bytes(b"\x7fELF, but not really")
    (tmp_path / "cxx").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    with pytest.raises(BuildError, match=r"can't be run .*Exec format error"):
        shared_library("device.cpp", csrc=csrc)


def test_cxx_may_hold_blanks_and_flags(
    cache: Path, csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tmp_path / "my compiler")
    monkeypatch.setenv("CXX", compiler.path)
    first = shared_library("device.cpp", csrc=csrc)
    monkeypatch.setenv("CXX", f"'{compiler.path}' -DANSWER=9")
    second = shared_library("device.cpp", csrc=csrc)
    assert (answer(first), answer(second), len(compiler.calls)) == (42, 9, 2)


def test_what_the_compiler_says_is_shown(cache: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    (csrc / "device.cpp").write_text(SOURCE + "int broken() { return no_such_name; }\n")
    with pytest.raises(BuildError) as caught:
        shared_library("device.cpp", csrc=csrc)
    message = str(caught.value)
    assert f"could not compile device.cpp for torch {torch.__version__}" in message
    assert "-std=c++20" in message and str(csrc / "device.cpp") in message
    assert "no_such_name" in message and "declared" in message


def test_of_a_long_complaint_the_end_is_shown(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set("seq -f 'line %g' 100 >&2; exit 1")
    with pytest.raises(BuildError) as caught:
        shared_library("device.cpp", csrc=csrc)
    assert "line 71\n" in str(caught.value) and "line 70\n" not in str(caught.value)
    assert str(caught.value).endswith("line 100")


def test_a_compiler_that_makes_nothing(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set("exit 0")
    with pytest.raises(BuildError, match=r"\(it ended with status 0\)[\s\S]*\(nothing\)"):
        shared_library("device.cpp", csrc=csrc)


def test_a_full_disk(cache: Path, csrc: Path, compiler: Compiler) -> None:
    compiler.set("echo 'ld: final link failed: No space left on device' >&2; exit 1")
    with pytest.raises(BuildError, match=r"No space left on device\): make room, or set TORCHHAL_SIM_CACHE"):
        shared_library("device.cpp", csrc=csrc)


# The cache folder.


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        for path in Path(folder).rglob("*"):
            path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)


def as_somebody(function: Callable[[], None]) -> int:
    """Run ``function`` in a process that file modes bind, which they don't for root; the process's exit code."""

    def run() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        function()

    process = FORK.Process(target=run)
    process.start()
    process.join(30)
    assert process.exitcode is not None
    return process.exitcode


def test_a_read_only_cache(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csrc, cache = write_sources(open_folder / "csrc"), open_folder / "cache"
    compiler = Compiler(open_folder / "compiler")
    monkeypatch.setenv("CXX", compiler.path)
    monkeypatch.setenv("TORCHHAL_SIM_CACHE", str(cache))
    library = shared_library("device.cpp", csrc=csrc)
    for path in (*cache.iterdir(), cache):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)

    def ask() -> None:
        assert not os.access(cache, os.W_OK)
        assert shared_library("device.cpp", csrc=csrc) == library and answer(library) == 42
        monkeypatch.setenv("CXX", str(REAL))
        assert shared_library("device.cpp", csrc=csrc) == library, "what another compiler made is better than nothing"
        with pytest.raises(BuildError, match=r"\(Permission denied\): set TORCHHAL_SIM_CACHE to a folder that"):
            shared_library("device.cpp", defines=["ANSWER=1"], csrc=csrc)

    assert as_somebody(ask) == 0
    assert len(compiler.calls) == 1


def test_a_cache_that_can_not_be_made(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHHAL_SIM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError) as caught:
        shared_library("device.cpp", csrc=csrc)
    assert f"into {tmp_path}/file/cache (Not a directory): set TORCHHAL_SIM_CACHE" in str(caught.value)


def test_no_home(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHHAL_SIM_CACHE", "~no-such-user/cache")
    with pytest.raises(BuildError, match=r"no folder to compile .* into .*: set TORCHHAL_SIM_CACHE to one"):
        shared_library("device.cpp", csrc=csrc)


@pytest.mark.parametrize("name", ["with blanks", "a,b;c:d", 'it\'s "$(quoted)" *', "größe", "-o"])
def test_odd_characters_in_the_path(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TORCHHAL_SIM_CACHE", str(tmp_path / name))
    sources = shutil.copytree(csrc, tmp_path / f"{name} sources")
    library = shared_library("device.cpp", csrc=sources)
    assert library.is_relative_to(tmp_path / name) and answer(library) == 42
    assert left_over(tmp_path / name) == []


def test_where_the_cache_is(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def set_to(**values: str) -> SimpleNamespace:
        for name in ("TORCHHAL_SIM_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"HOME": str(tmp_path / "home"), **values}.items():
            monkeypatch.setenv(name, value)
        return SimpleNamespace(cache=shared_library("device.cpp", csrc=csrc).parent.parent)

    home = tmp_path / "home" / ".cache" / "torchhal-simulator"
    assert set_to().cache == home
    assert set_to(TORCHHAL_SIM_CACHE="").cache == home
    assert set_to(XDG_CACHE_HOME="relative").cache == home
    assert set_to(XDG_CACHE_HOME=str(tmp_path / "xdg")).cache == tmp_path / "xdg" / "torchhal-simulator"
    assert set_to(TORCHHAL_SIM_CACHE="some/folder").cache == tmp_path / "some" / "folder"
    assert set_to(TORCHHAL_SIM_CACHE="~/own").cache == tmp_path / "home" / "own"


@pytest.mark.parametrize("mask", [0o022, 0o002, 0])
def test_other_users_can_read_what_one_has_built_and_not_write_it(cache: Path, csrc: Path, mask: int) -> None:
    """Root's cache serves all users. That of another one serves nobody else: a library is code that is run."""
    before = os.umask(mask)
    try:
        library = shared_library("device.cpp", csrc=csrc)
        assert shared_library("device.cpp", csrc=csrc) == library
    finally:
        os.umask(before)
    for path in (library, library.parent / "sha256"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o066 == 0o044
    assert stat.S_IMODE(library.parent.stat().st_mode) == stat.S_IMODE(cache.stat().st_mode) == 0o755


@pytest.mark.slow
@pytest.mark.parametrize("what", ["cache", "entry", "library", "sha256"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_not_run(cache: Path, csrc: Path, compiler: Compiler, what: str, mode: int) -> None:
    library = shared_library("device.cpp", csrc=csrc)
    path = {"cache": cache, "entry": library.parent, "library": library, "sha256": library.parent / "sha256"}[what]
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    with pytest.raises(BuildError) as caught:
        shared_library("device.cpp", csrc=csrc)
    assert str(caught.value).startswith(f"{path} can be written by other users (mode ")
    assert "chmod go-w it if it is yours, or set TORCHHAL_SIM_CACHE" in str(caught.value)
    assert len(compiler.calls) == 1
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
    assert shared_library("device.cpp", csrc=csrc) == library


def test_a_sticky_folder_will_do(cache: Path, csrc: Path) -> None:
    cache.mkdir()
    cache.chmod(0o1777)
    assert shared_library("device.cpp", csrc=csrc) == shared_library("device.cpp", csrc=csrc)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("what", ["cache", "entry", "library"])
def test_what_another_user_owns_is_not_run(cache: Path, csrc: Path, what: str) -> None:
    library = shared_library("device.cpp", csrc=csrc)
    path = {"cache": cache, "entry": library.parent, "library": library}[what]
    os.chown(path, 65534, 65534)
    with pytest.raises(BuildError, match=r"belongs to another user \(id 65534\), and what lies there is run"):
        shared_library("device.cpp", csrc=csrc)


def test_the_default_place_is_the_user_s_alone(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHHAL_SIM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = shared_library("device.cpp", csrc=csrc).parent.parent
    assert folder == tmp_path / "xdg" / "torchhal-simulator" and stat.S_IMODE(folder.stat().st_mode) == 0o700
