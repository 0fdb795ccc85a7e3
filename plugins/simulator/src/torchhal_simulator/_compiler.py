"""Find a C++ compiler, and run it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from torchhal_simulator._build_errors import FULL, BuildError, disk_full

COMPILE_LIMIT = 15 * 60.0
"""Seconds after which a compilation is ended: far beyond any real one."""


def find_compiler() -> tuple[list[str], list[str]]:
    """Return the compiler's command and what identifies it, which is read anew each time, within milliseconds."""
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


def run_compiler(command: list[str], source: str, library: Path, temporary: Path, cache: Path) -> None:
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
        errors = process.communicate(timeout=COMPILE_LIMIT)[1].decode(errors="replace")
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildError(
                f"compiling {source} took longer than {COMPILE_LIMIT / 60:g} minutes and was ended. Does the compiler "
                f"work, and is there enough memory? The command was:\n  {shlex.join(command)}"
            ) from None
        raise
    if process.returncode == 0 and library.is_file():
        return
    for why in FULL.values():
        if why in errors:
            raise disk_full(cache, why)
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
    lines = "\n".join(f"  {line}" for line in errors.strip().splitlines()[-30:]) or "  (nothing)"
    raise BuildError(
        f"the C++ compiler could not compile {source} for torch {torch.__version__} (it ended with {ended}). If it is "
        "older than C++20, name a newer one in the environment variable CXX. The command was:\n"
        f"  {shlex.join(command)}\nand the last lines of what it said:\n{lines}"
    )
