"""What torchhal costs before anything is trained, as ratios to ``import torch`` on the same machine.

Each round starts every program once, in turn, so that a slow spell of the machine hits all alike; the medians of the
rounds are compared. The programs are whole processes, Python's own start included::

    python benchmarks/discovery.py [--rounds 15] [--plugins 50]

Exit code 1 when a ratio is above its limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MANIFEST = """\
from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_accelerators():
    return [Component("board_{n}", "bench_{n}.accelerator:Board", summary="Board {n}", requires=("no_such_vendor",))]


@hookimpl
def torchhal_strategies():
    return [Component("board_{n}_parallel", "bench_{n}.strategy:Parallel", summary="All of board {n}")]
"""
# A README of usual length: it is part of the file that the version and the requirements are read from.
METADATA = """\
Metadata-Version: 2.4
Name: bench-{n}
Version: 1.{n}
Summary: Board {n}
Requires-Python: >=3.10
Requires-Dist: torchhal<1,>=0.0.1
Requires-Dist: torch>=2.6
Provides-Extra: vendor
Requires-Dist: vendor-sdk; extra == 'vendor'
Description-Content-Type: text/markdown

""" + "\n".join("A line of a description that says what one line of a description says." for _ in range(100))


def install(folder: Path, count: int) -> None:
    """``count`` plugins in ``folder``, as pip would leave them."""
    for n in range(count):
        package, info = folder / f"bench_{n}", folder / f"bench_{n}-1.{n}.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").touch()
        (package / "_plugin.py").write_text(MANIFEST.format(n=n))
        (info / "METADATA").write_text(METADATA.format(n=n))
        (info / "entry_points.txt").write_text(f"[torchhal]\nbench_{n} = bench_{n}._plugin\n")


def seconds(arguments: list[str], environ: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environ, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plugins", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder), arguments.plugins)
        bare = {name: value for name, value in os.environ.items() if not name.startswith("TORCHHAL_")}
        with_plugins = {**bare, "PYTHONPATH": folder}
        programs = {
            "python": (["-c", "pass"], bare),
            "import torch": (["-c", "import torch"], bare),
            "import torchhal": (["-c", "import torchhal"], bare),
            "import torchhal.registry": (["-c", "import torchhal.registry"], bare),
            "torchhal plugins": (["-m", "torchhal.cli", "plugins"], with_plugins),
        }
        for run in programs.values():  # fills the caches of files and byte code
            seconds(*run)
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(arguments.rounds):
            for name, run in programs.items():
                times[name].append(seconds(*run))
    medians = {name: statistics.median(values) for name, values in times.items()}
    failed = False
    for name, limit in (("import torchhal", 0.03), ("import torchhal.registry", None), ("torchhal plugins", 0.2)):
        ratio = medians[name] / medians["import torch"]
        net = (medians[name] - medians["python"]) / (medians["import torch"] - medians["python"])
        over = limit is not None and ratio > limit
        failed |= over
        target = f"limit {limit}{'  TOO SLOW' if over else ''}" if limit is not None else ""
        print(f"{name:26} {ratio:.4f} of import torch ({net:.4f} without Python's start)  {target}".rstrip())
    print("seconds: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    return failed


if __name__ == "__main__":
    sys.exit(main())
