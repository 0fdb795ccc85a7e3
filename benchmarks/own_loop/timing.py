"""Time the steps of a task's loops in one process, in turn: ``python timing.py TASK ROUNDS`` prints JSON."""

import itertools
import json
import runpy
import sys
import time
from pathlib import Path

import tasks


def step_times(task: str, loop: str) -> list[float]:
    """CPU seconds of each step but the first ten, which are slower."""
    stamps: list[float] = []
    tasks.record = lambda loss: stamps.append(time.process_time())
    runpy.run_path(str(Path(__file__).parent / task / f"{loop}.py"))
    return [after - before for before, after in itertools.pairwise(stamps[10:])]


def main() -> None:
    task, rounds = sys.argv[1], int(sys.argv[2])
    loops = ("plain", "with_run", "with_accelerate")
    times: dict[str, list[float]] = {loop: [] for loop in loops}
    for turn in range(rounds + 1):
        for loop in loops[turn % 3 :] + loops[: turn % 3]:
            found = sorted(step_times(task, loop))
            if turn:  # in the first one, libraries and threads are set up
                times[loop].append(found[len(found) // 4])
    sys.stdout.write("\n" + json.dumps(times) + "\n")


if __name__ == "__main__":
    main()
