"""Builds Horovod 0.28.1 for the torch of this interpreter, with gloo alone; two minutes.

    .venv-horovod/bin/python plugins/horovod/environment/install.py

Needs g++ and make. Horovod's CMake files ask for C++14, and torch's headers since 2.1 need C++17, so the compiler is
one that puts the one in the place of the other. ``CMAKE_POLICY_VERSION_MINIMUM`` is for the CMake 4 that pip installs.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "0.28.1"
# what setup.py imports, and what the package imports at run time
REQUIREMENTS = ("setuptools<81", "wheel", "cmake>=3.20", "cloudpickle", "psutil", "pyyaml", "cffi")
COMPILER = """\
#!/bin/sh
for argument; do
	shift
	case $argument in -std=c++14 | -std=gnu++14) argument=-std=c++17 ;; esac
	set -- "$@" "$argument"
done
exec "{compiler}" "$@"
"""
FEATURES = {
    "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1", "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}  # fmt: skip


def main() -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        sys.exit("Horovod is built from its sources: this needs a C++ compiler (g++), and make")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *REQUIREMENTS], check=True)
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "c++17")
        wrapper.write_text(COMPILER.format(compiler=compiler), encoding="utf-8")
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        # no cache: a wheel of before may be for another torch
        environ = {**os.environ, **FEATURES, "CXX": str(wrapper), "MAKEFLAGS": f"-j{os.cpu_count()}"}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for CMake
        subprocess.run(
            [*pip, "--no-cache-dir", "--no-build-isolation", "--no-deps", f"horovod=={VERSION}"],
            check=True,
            env=environ,
        )
    subprocess.run([sys.executable, "-c", "import horovod.torch"], check=True)


if __name__ == "__main__":
    main()
