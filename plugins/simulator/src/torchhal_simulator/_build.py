"""Compile the plugin's C++ on first use, into a cache that all processes of a user share.

``torch.utils.cpp_extension`` isn't used: it needs setuptools and ninja at run time, names a cached library by too
little (not by torch, the headers or the compiler), and when one process fails to compile, others that waited for it
fail with an import error of a file that was never made.

The cache holds, per library::

    device-<key>-<compiler>/device.so     what is loaded
    device-<key>-<compiler>/sha256        its digest: mapping a file that was cut off kills the process
    device-<key>-<compiler>.lock          held by the process that compiles; its content is the last failure
    device-<key>-<compiler>.<random>.tmp  where it compiles; a killed process leaves it, the next one removes it

A library that this user runs may have been made by this user or root, and nobody else: folders and files that another
user owns or may write are refused. Whoever may only read them loads what root has built.

Nothing is pruned: a user gets a few small files per torch, and an age would say nothing about use, as loading a
library from a read-only cache leaves no trace. The folder may be deleted at any time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch

if sys.platform == "linux":
    import fcntl

TORCH_MINORS = ("2.13",)
"""The torch minors whose internal headers the sources are tested with, the newest last."""

CSRC = Path(__file__).parent / "csrc"

_COMPILE_LIMIT = 15 * 60.0  # seconds; far beyond any real compilation, so that one that hangs ends
_WAIT_LIMIT = 2 * _COMPILE_LIMIT
_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}

_log = logging.getLogger("torchhal_simulator")


class BuildError(ImportError):
    """The plugin's C++ can't be compiled here; the message says why and what to do."""


def check_torch() -> None:
    """Return if the installed torch is one that the sources were written for.

    Raises:
        BuildError: it is of another minor.
    """
    installed = str(torch.__version__)
    minor = ".".join(installed.split(".")[:2])
    if minor not in TORCH_MINORS:
        raise BuildError(
            f"this torchhal-simulator is for torch {' and '.join(TORCH_MINORS)}, whose internal headers it uses, and "
            f"torch {installed} is installed: install 'torch=={TORCH_MINORS[-1]}.*', or a torchhal-simulator made for "
            f"torch {minor}"
        )


def shared_library(source: str, *, defines: Sequence[str] = (), python: bool = False, csrc: Path = CSRC) -> Path:
    """The absolute path of ``csrc/source`` as a compiled shared library, compiled now unless the cache has it.

    Of several processes that ask at once, one compiles and all get its library, or all raise its error. A process
    that asks after a failure tries again.

    Args:
        source: a file name in ``csrc``; it and all other files there decide whether a cached library still fits. It
            exports what it marks ``C10_EXPORT`` and nothing else.
        defines: macros, ``"NAME"`` or ``"NAME=value"``.
        python: make an extension module. It may be loaded under any module name that ends in the source's stem,
            which is what ``TORCH_EXTENSION_NAME`` stands for.
        csrc: the folder with the sources.

    Raises:
        BuildError: torch is of another minor; there is no compiler, or it fails, or it doesn't end; the cache can't
            be written, or others may write it.
    """
    if sys.platform != "linux":
        raise BuildError(f"the simulated accelerator exists on Linux only (this is {sys.platform})")
    check_torch()
    stem = Path(source).stem
    name = stem + str(sysconfig.get_config_var("EXT_SUFFIX")) if python else f"{stem}.so"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    if python:
        flags += ["-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={stem}"]
    flags += [f"-D{define}" for define in defines]
    files = _digest_of_files(csrc, source)
    # Paths stay out: every environment with the same torch shares the library. Of torch's own build its flags count,
    # as two builds of one commit may differ. The C library is there for homes that are shared by machines.
    key = _digest(
        [
            str(torch.__version__),
            torch.version.git_version,
            torch.__config__._cxx_flags(),
            platform.machine(),
            os.confstr("CS_GNU_LIBC_VERSION"),
            source,
            name,
            flags,
            files,
        ]
    )[:16]
    cache = _cache()
    _check_owner(cache)
    try:
        compiler, identity = _compiler()
    except BuildError:
        if ready := _ready(cache, stem, key, name):
            return ready
        raise
    # Another compiler gives another entry, so that one which made a library that doesn't load can be replaced. Where
    # nothing can be compiled, a library by any compiler will do.
    entry = cache / f"{stem}-{key}-{_digest(identity)[:8]}"
    library = entry / name
    if _is_sound(library):
        return library
    try:
        cache.mkdir(mode=0o700 if _is_default(cache) else 0o755, parents=True, exist_ok=True)
        lock = open(f"{entry}.lock", "a+b", buffering=0)  # noqa: SIM115 (the with below closes it)
    except OSError as error:
        if ready := _ready(cache, stem, key, name):
            return ready
        raise _cannot_write(cache, error) from error
    with lock:
        # Who finds another failure after the wait than before it has waited for that failure. No clock is compared,
        # and no failure outlives the processes that waited for it.
        before = _read(lock)
        with _held(lock, source, cache):
            if _is_sound(library):
                return library
            failure = _read(lock)
            if failure and failure != before:
                raise BuildError(failure.partition(b"\n")[2].decode(errors="replace"))
            try:
                _compile(compiler, csrc, source, files, flags, entry, name, python=python)
            except BuildError as error:
                _write_failure(lock, str(error))
                raise
    return library


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _digest_of_files(csrc: Path, source: str) -> str:
    """What all files in ``csrc`` contain: which of them ``source`` includes isn't known before it is compiled."""
    if not (csrc / source).is_file():
        raise BuildError(f"{csrc} holds no {source}: the installation is incomplete, install torchhal-simulator again")
    files = sorted(path for path in csrc.rglob("*") if path.is_file())
    try:
        return _digest([(str(path.relative_to(csrc)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
    except OSError as error:
        raise BuildError(f"{error.filename} can't be read ({error.strerror}): {source} may include it") from error


def _cache() -> Path:
    try:
        if named := os.environ.get("TORCHHAL_SIM_CACHE"):
            return Path(named).expanduser().absolute()
        user_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not user_cache.is_absolute():  # the XDG specification: a relative path is invalid, ignore it
            user_cache = Path.home() / ".cache"
        return user_cache / "torchhal-simulator"
    except RuntimeError as error:
        raise BuildError(
            f"there is no folder to compile the simulated accelerator into ({error}): set TORCHHAL_SIM_CACHE to one "
            "that this process can write"
        ) from error


def _compiler() -> tuple[list[str], list[str]]:
    """The compiler's command and what identifies it, which is asked each time: that takes some milliseconds."""
    asked = os.environ.get("CXX", "").strip()
    if not asked:
        found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        if found is None:
            raise BuildError(
                "the simulated accelerator is compiled on first use, and no C++ compiler is on PATH (c++, g++ or "
                "clang++): install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda "
                "install cxx-compiler) or name one in the environment variable CXX"
            )
        words = [found]
    elif shutil.which(asked):  # a path with blanks
        words = [asked]
    else:
        try:
            words = shlex.split(asked)
        except ValueError:  # a quote that doesn't end
            words = [asked]
    program = shutil.which(words[0])
    advice = "name a C++ compiler in CXX, or unset it to use the c++, g++ or clang++ on PATH"
    if program is None:
        raise BuildError(f"CXX={asked!r} names no program that can be run: {advice}")
    command = [os.path.abspath(program), *words[1:]]
    try:
        answer = subprocess.run(
            [*command, "--version"],
            check=False,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {shlex.join(command)} can't be run ({error}): {advice}") from error
    return command, [*words[1:], answer.stdout.decode(errors="replace").partition("\n")[0]]


def _is_default(cache: Path) -> bool:
    return not os.environ.get("TORCHHAL_SIM_CACHE") and cache == _cache()


def _check_owner(path: Path) -> None:
    """Return if nobody but this user and root can have made or changed ``path``, or if it isn't there.

    A folder that all may write is sound where it is sticky, as /tmp is: what lies in it is asked next. A link counts as
    what it leads to, and the folder that holds it is not asked: who put it there chose the name.

    Raises:
        BuildError: somebody can.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if status.st_uid not in (0, os.getuid()):
        why = f"belongs to another user (id {status.st_uid})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (
        stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    ):
        why = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise BuildError(
        f"{path} {why}, and what lies there is run by whoever uses the simulated accelerator: "
        "chmod go-w it if it is yours, or set TORCHHAL_SIM_CACHE to a folder that only you can write"
    )


def _is_sound(library: Path) -> bool:
    """Whether a library is there and whole.

    Raises:
        BuildError: somebody else may have put it there.
    """
    for path in (library.parent, library, library.parent / "sha256"):
        _check_owner(path)
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest().encode() == (library.parent / "sha256").read_bytes()
    except OSError:
        return False


def _ready(cache: Path, stem: str, key: str, name: str) -> Path | None:
    with suppress(OSError):
        return next(filter(_is_sound, sorted(cache.glob(f"{stem}-{key}-*/{name}"))), None)
    return None


def _cannot_write(cache: Path, error: OSError) -> BuildError:
    if error.errno in _FULL:
        return _full(cache, _FULL[error.errno])
    return BuildError(
        f"the simulated accelerator can't be compiled into {cache} ({error.strerror}): set TORCHHAL_SIM_CACHE to a "
        "folder that this process can write and lock"
    )


def _full(cache: Path, why: str) -> BuildError:
    return BuildError(
        f"the simulated accelerator can't be compiled into {cache} ({why}): make room, or set TORCHHAL_SIM_CACHE to a "
        "folder on another disk"
    )


@contextmanager
def _held(lock: IO[bytes], source: str, cache: Path) -> Iterator[None]:
    """Hold ``lock``. The kernel frees it when its holder dies, however that happens."""
    deadline = time.monotonic() + _WAIT_LIMIT
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BuildError(
                    f"another process has been compiling {source} for more than {_WAIT_LIMIT / 60:g} minutes, or is "
                    f"stopped: end the one that holds {lock.name}, or set TORCHHAL_SIM_CACHE to another folder"
                ) from None
            time.sleep(0.05)
        except OSError as error:  # a file system without locks
            raise _cannot_write(cache, error) from error
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing isn't enough where another thread has forked meanwhile


def _read(lock: IO[bytes]) -> bytes:
    lock.seek(0)
    return lock.read()


def _write_failure(lock: IO[bytes], message: str) -> None:
    """Tell the processes that wait. The id tells two equal failures apart."""
    with suppress(OSError):  # a full disk: then each finds out by itself
        lock.truncate(0)
        lock.write(f"{os.urandom(8).hex()}\n{message}".encode(errors="replace"))


def _compile(
    compiler: list[str],
    csrc: Path,
    source: str,
    files: str,
    flags: list[str],
    entry: Path,
    name: str,
    *,
    python: bool,
) -> None:
    """Make ``entry`` with the library and its digest, or leave nothing. Called with the entry's lock held."""
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
    if python:
        libraries.append("-ltorch_python")
        includes.append(Path(sysconfig.get_path("include")))
        if not (includes[-1] / "Python.h").is_file():
            raise BuildError(
                f"compiling {source} needs Python's headers, and {includes[-1]} has no Python.h: install them "
                "(Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
            )
    command = [*compiler, *flags]
    for folder in includes:
        command += ["-isystem", str(folder)]  # torch's own warnings would push the error out of sight
    # -Wl would split a path at its commas.
    command += [str((csrc / source).absolute()), "-o", name, f"-L{root / 'lib'}", "-Xlinker", "-rpath"]
    command += ["-Xlinker", str(root / "lib"), *libraries]
    cache = entry.parent
    _log.warning(
        "compiling the simulated accelerator (%s) for torch %s: about half a minute, once",
        source,
        torch.__version__,
    )
    try:
        _remove_temporary(entry)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".tmp", dir=cache))
        made = temporary / "entry"  # mkdtemp's own folder is closed to other users
        made.mkdir()
        made.chmod(made.stat().st_mode & 0o755)
        _run(command, source, made / name, temporary, cache)
        if _digest_of_files(csrc, source) != files:
            raise BuildError(f"files in {csrc} changed while {source} was compiled: run it again")
        digest = hashlib.sha256((made / name).read_bytes()).hexdigest()
        (made / "sha256").write_text(digest)
        for path in (made / name, made / "sha256"):  # the umask may let a group write
            path.chmod(path.stat().st_mode & 0o755)
        for path in (made / name, made / "sha256", made):
            _sync(path)
        if entry.exists():  # damaged; who has it mapped keeps it
            shutil.rmtree(entry)
        made.rename(entry)
        _sync(cache)
    except OSError as error:
        raise _cannot_write(cache, error) from error
    finally:
        _remove_temporary(entry)


def _remove_temporary(entry: Path) -> None:
    """Remove this process's folder and those of killed ones.

    A compiler whose parent was killed still runs; it finds its folder gone and fails. A file that it makes at this
    moment goes with the next call.
    """
    for path in entry.parent.glob(f"{entry.name}.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _run(command: list[str], source: str, library: Path, temporary: Path, cache: Path) -> None:
    """Run the compiler in the library's folder, with its own temporary files in ``temporary``."""
    try:
        process = subprocess.Popen(
            command,
            cwd=library.parent,
            env=os.environ | {"LC_ALL": "C", "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that the processes which it starts can be ended with it
        )
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} can't be run ({error}): name another one in CXX") from error
    assert process.stderr is not None
    try:
        errors = process.communicate(timeout=_COMPILE_LIMIT)[1].decode(errors="replace")
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildError(
                f"compiling {source} took longer than {_COMPILE_LIMIT / 60:g} minutes and was ended. Does the compiler "
                f"work, and is there enough memory? The command was:\n  {shlex.join(command)}"
            ) from None
        raise
    if process.returncode == 0 and library.is_file():
        return
    for why in _FULL.values():
        if why in errors:
            raise _full(cache, why)
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
    lines = "\n".join(f"  {line}" for line in errors.strip().splitlines()[-30:]) or "  (nothing)"
    raise BuildError(
        f"the C++ compiler could not compile {source} for torch {torch.__version__} (it ended with {ended}). If it is "
        "older than C++20, name a newer one in the environment variable CXX. The command was:\n"
        f"  {shlex.join(command)}\nand the last lines of what it said:\n{lines}"
    )
