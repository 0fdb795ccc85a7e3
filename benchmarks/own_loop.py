"""A plain loop, the same with ``torchhal.Run`` and with Accelerate: lines changed, losses, resume and step time.

    python benchmarks/own_loop.py [--tasks nlp vision ...] [--rounds 15] [--no-times]

The scripts are in ``own_loop/TASK``: ``plain.py``, ``with_run.py`` and ``with_accelerate.py``; nlp needs transformers.
Lines are counted against the plain loop by difflib, without blank ones and without indentation: those that are new or
changed, and after a minus those that fall away. Losses: the greatest difference to the plain loop, in one process and
under ``torchrun`` in two (half the batch each, the mean over the ranks). Resume: that of the losses after a checkpoint
in the midst of an epoch, continued in a new process, to those of the same script that went on. Times: the three scripts
run in turn in one process, on one thread, so that a slow moment of the machine hits all alike; a step's is the lower
quartile of a round's CPU times, the ratio the median over the rounds. Bounds: Run changes no more lines than
Accelerate, its losses in one process and after a resume are equal, and its steps take at most 1.01x, where a plain one
takes a millisecond or more.
"""

import argparse
import difflib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).with_suffix("")
TASKS = ("nlp", "vision", "gan", "accumulation", "resume")
LOOPS = ("plain", "with_run", "with_accelerate")
BOUND = 1.01
STEPS = {"nlp": 60, "vision": 150, "gan": 150, "accumulation": 150, "resume": 150}


def lines(task: str, loop: str) -> list[str]:
    """The lines of a script that count, without its docstring."""
    text = (FOLDER / task / f"{loop}.py").read_text()
    return [line.strip() for line in text.splitlines()[1:] if line.strip()]


def lines_changed(task: str, loop: str) -> tuple[int, int]:
    """Lines of another loop that the plain one doesn't have, and how many lines of that fall away."""
    blocks = difflib.SequenceMatcher(None, lines(task, "plain"), lines(task, loop), autojunk=False).get_opcodes()
    changed = [(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in blocks if tag != "equal"]
    return sum(new for _, new in changed), sum(max(0, old - new) for old, new in changed)


def environment(out: Path, **settings: object) -> dict[str, str]:
    own = {f"OWN_LOOP_{name.upper()}": str(value) for name, value in settings.items()}
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OWN_LOOP_OUT": str(out), **own}


def run(task: str, loop: str, folder: Path, world: int = 1, **settings: object) -> dict:
    """Run a script and return its losses, those of several ranks as their mean, and what it found."""
    script = str(FOLDER / task / f"{loop}.py")
    launcher = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    out = folder / f"{task}-{loop}-{world}"
    variables = environment(out, folder=folder, **settings)
    done = subprocess.run(
        [sys.executable, *launcher, script], env=variables, cwd=folder, capture_output=True, text=True, check=False
    )
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{out.name}.*.json"))]
    if done.returncode or len(found) != world:
        raise SystemExit(f"{task}/{loop}.py, {world} process(es), exit code {done.returncode}:\n{done.stderr[-4000:]}")
    for path in folder.glob(f"{out.name}.*.json"):
        path.unlink()
    losses = [statistics.fmean(values) for values in zip(*(each["losses"] for each in found), strict=True)]
    return {"losses": losses, "results": found[0]["results"]}


def difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other), (len(one), len(other))
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def resume_difference(loop: str, folder: Path) -> float:
    """Between the losses of a script that went on after its save and those of one that continued it."""
    whole = run("resume", loop, folder)["losses"]
    rest = run("resume", loop, folder, resumes=1)["losses"]
    return difference(whole[-len(rest) :], rest)


def step_times(task: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """CPU seconds of a step of each loop, the lower quartile of each round; the loops run in turn in one process."""
    variables = environment(folder / "times", folder=folder, batches=STEPS[task], epochs=1)
    command = [sys.executable, str(FOLDER / "timing.py"), task, str(rounds)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"timing.py {task}, exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-times", action="store_true")
    arguments = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("transformers") is None:
        print("skipped: accelerate and transformers aren't installed")
        return
    missed = []
    print(f"{'task':<13} {'loop':<11} lines  difference, 1 process   2 processes   resumed   step time")
    for task in arguments.tasks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plain = run(task, "plain", folder)
            times = None if arguments.no_times else step_times(task, arguments.rounds, folder)
            resumed = {loop: resume_difference(loop, folder) if task == "resume" else None for loop in LOOPS}
            changed = {loop: lines_changed(task, loop) for loop in LOOPS}
            for loop in LOOPS:
                alone = run(task, loop, folder)
                # shuffled batches and dropout are drawn otherwise in two processes
                both = run(task, loop, folder, 2) if task != "resume" and loop != "plain" else None
                cells = [f"{difference(alone['losses'], plain['losses']):.1e}", "", "", ""]
                if both is not None:
                    cells[1] = f"{difference(both['losses'], plain['losses']):.1e}"
                    if both["results"] != plain["results"]:
                        cells[1] += f" {both['results']} for {plain['results']}"
                if resumed[loop] is not None:
                    cells[2] = f"{resumed[loop]:.1e}"
                if times is not None:
                    step = statistics.median(times[loop])
                    ratio = statistics.median(a / b for a, b in zip(times[loop], times["plain"], strict=True))
                    cells[3] = f"{step * 1e3:.2f} ms, {ratio:.3f}x"
                    if loop == "with_run" and ratio > BOUND and step >= 1e-3:
                        missed.append(f"{task}: {ratio:.3f}x")
                if loop == "with_run":
                    equal = alone["losses"] == plain["losses"] and alone["results"] == plain["results"]
                    missed += [] if equal else [f"{task}: losses or results of one process"]
                    missed += [f"{task}: resume"] if resumed[loop] else []
                    missed += [f"{task}: lines"] if changed[loop][0] > changed["with_accelerate"][0] else []
                count = "" if loop == "plain" else " -".join(map(str, filter(None, changed[loop])))
                print(
                    f"{task:<13} {loop.removeprefix('with_'):<11} {count:<5}  {cells[0]:<21}  {cells[1]:<12}  "
                    f"{cells[2]:<8}  {cells[3]}",
                    flush=True,
                )
    if missed:
        raise SystemExit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
