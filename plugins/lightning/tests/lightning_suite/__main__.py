"""Runs Lightning's own tests by torchhal's Trainer, and says of each that fails why it does.

    python plugins/lightning/tests/lightning_suite FOLDER [FILE ...]

FOLDER is a checkout of Lightning at the installed version's tag; where it doesn't exist, it is cloned. Lightning's
tests are fetched, never committed here. They run twice: by Lightning's own Trainer, whose outcomes are kept beside the
checkout, and by torchhal's. What counts is each test that makes a Trainer, asks for public behaviour only (overlay.py)
and passes by Lightning's on this machine. ``known.toml`` gives the class of each that fails by torchhal's:

- ``design``: torchhal's way holds; the README's table of differences has it,
- ``words``: the same behaviour, in other words of an error or a log, which the table has too,
- ``missing``: not mapped yet,
- ``defect``: ours; also what the file doesn't name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).parent
REPOSITORY = "https://github.com/Lightning-AI/pytorch-lightning"
OUTSIDE = ("tests_pytorch/accelerators", "tests_pytorch/graveyard", "tests_pytorch/strategies/launchers")
"""Folders whose tests are about Lightning's parts themselves."""


def fetch(folder: Path) -> None:
    """Clone Lightning at the tag of the installed version."""
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", version("lightning"), REPOSITORY, str(folder)]
    subprocess.run(command, check=True)


def run(folder: Path, trainer: str, files: Iterable[str], only: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Run the tests of ``files`` by the Trainer of ``trainer``, and return each one's line of results.

    Each file has a process of its own, so that what one leaves behind, or a crash, is not another's. A file that has
    results already is not run again.
    """
    results, only = results_of(folder, trainer), set(only)
    paths = [HERE.resolve(), (folder / "tests").resolve(), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "LIGHTNING_SUITE_TRAINER": trainer,
        "LIGHTNING_SUITE_RESULTS": str(results.resolve()),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "overlay", "-p", "no:cacheprovider", "-p", "no:doctest",
        "--tb=short", "--override-ini=addopts=", "--override-ini=xfail_strict=false", "--timeout=120",
        "--disable-warnings",
    ]  # fmt: skip

    def run_file(name: str) -> tuple[str, str]:
        """Run a file's tests; those after one that ended the process in another process."""
        said, wanted = "", {test for test in only if f"{name}::" in test}
        chosen = folder / f"only-{name.replace('/', '-')}.json"
        while True:
            chosen.write_text(json.dumps(sorted(wanted)), encoding="utf-8")
            own = environment | {"LIGHTNING_SUITE_ONLY": str(chosen.resolve())}
            done = subprocess.run(
                [*command, name], cwd=folder / "tests", env=own, check=False, capture_output=True, text=True
            )
            said += done.stdout + done.stderr
            ran = {test for line in lines_of(results) for test in (line.get("test"), line.get("begun"))}
            if not (left := wanted - ran) or left == wanted:
                chosen.unlink()
                return name, said
            wanted = left

    ended = {line["file"] for line in lines_of(results) if "file" in line}
    with ThreadPoolExecutor(2) as pool, open(folder / f"output-{trainer}.txt", "a", encoding="utf-8") as output:
        for name, said in pool.map(run_file, (name for name in files if name not in ended)):
            output.write(said)
            output.flush()
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"file": name}) + "\n")
    return {line["test"]: line for line in lines_of(results) if "test" in line}


def results_of(folder: Path, trainer: str) -> Path:
    return folder / f"results-{trainer}-{version(trainer)}.jsonl"


def lines_of(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="such as tests_pytorch/callbacks/test_timer.py; all without")
    chosen = parser.parse_args()
    folder = chosen.folder
    if not folder.exists():
        fetch(folder)
    tests = folder / "tests"
    every = [str(path.relative_to(tests)) for path in sorted(tests.glob("tests_pytorch/**/test_*.py"))]
    theirs = run(folder, "lightning", [name for name in every if not name.startswith(OUTSIDE)])
    fair = {test for test, line in theirs.items() if line["outcome"] == "passed" and line["trainers"]}
    if chosen.files:
        fair = {test for test in fair if any(name in test for name in chosen.files)}
    files = [name for name in every if any(f"{name}::" in test for test in fair)]
    for earlier in (results_of(folder, "torchhal"), folder / "output-torchhal.txt"):
        earlier.unlink(missing_ok=True)
    report(fair, run(folder, "torchhal", files, fair))


def report(counted: set[str], ours: dict[str, dict[str, Any]]) -> None:
    """Print each test that failed, with its class, and the sums."""
    known: dict[str, dict[str, str]] = tomllib.loads((HERE / "known.toml").read_text(encoding="utf-8"))
    class_of = {test: kind for kind, tests in known.items() for test in tests}
    classes: Counter[str] = Counter()
    for test in sorted(counted):
        line = ours.get(test, {"outcome": "lost", "why": "no result: its process died"})
        if line["outcome"] == "passed":
            continue
        kind = class_of.get(test) or class_of.get(test.partition("[")[0]) or "defect"
        classes[kind] += 1
        print(f"{kind:8} {test}\n         {line['why'].splitlines()[0][:160] if line['why'] else line['outcome']}")
    differ = classes["design"] + classes["words"]
    asked, passed = len(counted) - differ, len(counted) - classes.total()
    print(f"\n{passed} of {asked} pass ({passed / max(asked, 1):.1%})")
    print(f"the page of differences contradicts {differ}: design {classes['design']}, words {classes['words']}")
    print(f"of the others missing {classes['missing']}, defect {classes['defect']}")


if __name__ == "__main__":
    main()
