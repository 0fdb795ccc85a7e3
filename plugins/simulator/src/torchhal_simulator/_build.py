"""Compile the plugin's C++ on first use, into a cache that all processes of a user share.

``torch.utils.cpp_extension`` isn't used: it needs setuptools and ninja at run time, names a cached library by too
little (not by torch, the headers or the compiler), and when one process fails to compile, others that waited for it
fail with an import error of a file that was never made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from torchhal_simulator._build_cache import (
    cache_folder,
    check_owner,
    find_ready,
    hold_lock,
    is_default,
    is_sound,
    read_failure,
    remove_temporary,
    sync,
    write_failure,
)
from torchhal_simulator._build_errors import BuildError, cannot_write
from torchhal_simulator._compiler import find_compiler, run_compiler

TORCH_MINORS = ("2.13",)
"""The torch minors whose internal headers the sources are tested with, the newest last."""

CSRC = Path(__file__).parent / "csrc"

_log = logging.getLogger("torchhal_simulator")


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
    """Return the path of ``csrc/source`` as a compiled library, compiled now unless the cache has it.

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
    cache = cache_folder()
    check_owner(cache)
    try:
        compiler, identity = find_compiler()
    except BuildError:
        if ready := find_ready(cache, stem, key, name):
            return ready
        raise
    # Another compiler gives another entry, so that one which made a library that doesn't load can be replaced. Where
    # nothing can be compiled, a library by any compiler will do.
    entry = cache / f"{stem}-{key}-{_digest(identity)[:8]}"
    library = entry / name
    if is_sound(library):
        return library
    try:
        cache.mkdir(mode=0o700 if is_default(cache) else 0o755, parents=True, exist_ok=True)
        lock = open(f"{entry}.lock", "a+b", buffering=0)  # noqa: SIM115 (the with below closes it)
    except OSError as error:
        if ready := find_ready(cache, stem, key, name):
            return ready
        raise cannot_write(cache, error) from error
    with lock:
        # Who finds another failure after the wait than before it has waited for that failure. No clock is compared,
        # and no failure outlives the processes that waited for it.
        before = read_failure(lock)
        with hold_lock(lock, source, cache):
            if is_sound(library):
                return library
            failure = read_failure(lock)
            if failure and failure != before:
                raise BuildError(failure.partition(b"\n")[2].decode(errors="replace"))
            try:
                _compile(compiler, csrc, source, files, flags, entry, name, python=python)
            except BuildError as error:
                write_failure(lock, str(error))
                raise
    return library


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _digest_of_files(csrc: Path, source: str) -> str:
    """Return a digest of all files in ``csrc``.

    Which of them ``source`` includes isn't known before it is compiled.
    """
    if not (csrc / source).is_file():
        raise BuildError(f"{csrc} holds no {source}: the installation is incomplete, install torchhal-simulator again")
    files = sorted(path for path in csrc.rglob("*") if path.is_file())
    try:
        return _digest([(str(path.relative_to(csrc)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
    except OSError as error:
        raise BuildError(f"{error.filename} can't be read ({error.strerror}): {source} may include it") from error


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
    """Make ``entry`` with the library and its digest, or leave nothing, with the entry's lock held."""
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
        remove_temporary(entry)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".tmp", dir=cache))
        made = temporary / "entry"  # mkdtemp's own folder is closed to other users
        made.mkdir()
        made.chmod(made.stat().st_mode & 0o755)
        run_compiler(command, source, made / name, temporary, cache)
        if _digest_of_files(csrc, source) != files:
            raise BuildError(f"files in {csrc} changed while {source} was compiled: run it again")
        digest = hashlib.sha256((made / name).read_bytes()).hexdigest()
        (made / "sha256").write_text(digest)
        for path in (made / name, made / "sha256"):  # the umask may let a group write
            path.chmod(path.stat().st_mode & 0o755)
        for path in (made / name, made / "sha256", made):
            sync(path)
        if entry.exists():  # damaged; who has it mapped keeps it
            shutil.rmtree(entry)
        made.rename(entry)
        sync(cache)
    except OSError as error:
        raise cannot_write(cache, error) from error
    finally:
        remove_temporary(entry)
