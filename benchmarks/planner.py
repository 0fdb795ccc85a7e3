"""What ``strategy="auto"`` picks on simulated devices of little memory, and how fast that is beside all else that fits.

    python benchmarks/planner.py [--only Deep/2/25 ...] [--rounds 3] [--steps 12]

Each combination of model, devices and memory (10^6 bytes) is trained in processes of its own: first by
``strategy="auto"``, then, in turn, by every candidate that is predicted to need no more than the memory; one that runs
out of it anyway is left out. A step's time is a round's median, of the slowest rank, and the least of the rounds.
Bounds: the pick runs in 1.15x of its predicted peak, and its steps take at most 1.25x of those of the fastest candidate
that fits with the margin.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from torchhal import Callback, Trainer

COMBINATIONS = (
    "Deep/1/30", "Deep/2/34", "Deep/2/22", "Deep/4/16", "Wide/2/75", "Wide/4/50", "Conv/1/16", "Conv/2/30",
    "Transformer/1/65", "Transformer/2/75", "Transformer/4/45", "Embedding/2/48", "Embedding/1/48", "Tied/2/85",
    "Tied/2/50",
)  # fmt: skip
PEAK_BOUND, TIME_BOUND = 1.15, 1.25
TESTS = Path(__file__).parents[1] / "core" / "tests"


def run(combination: str, rounds: int, steps: int) -> dict:
    devices = combination.split("/")[1]
    launcher = [] if devices == "1" else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [
        sys.executable,
        *launcher,
        __file__,
        "--worker",
        combination,
        "--rounds",
        str(rounds),
        "--steps",
        str(steps),
    ]
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHHAL_SIM_DEVICES": devices}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{combination} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def work(combination: str, rounds: int, steps: int) -> None:
    """Measure one combination, on one of its ranks."""
    import memory_models
    import torch

    import torchhal_simulator
    from torchhal.trainer._trial import release_frames
    from torchhal.trainer.planning import _planning as planning

    name, devices, limit = combination.split("/")
    devices, limit = int(devices), int(float(limit) * 1e6)
    torchhal_simulator.load()
    module = torch.get_device_module("sim")
    cls = memory_models.MODELS[name]
    size = cls.batch_size
    torch.manual_seed(0)  # ranks that share a batch need the same
    data = torch.utils.data.TensorDataset(*cls.batch(size * devices * steps))

    def fit(strategy, *, fused=False, batches=1):
        torch.manual_seed(0)
        model = cls()
        if fused:
            model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        seen, ticks = [], Ticks()
        trainer = Trainer(
            accelerator="sim", strategy=strategy, devices=devices, max_epochs=1, accumulate_grad_batches=batches,
            callbacks=[memory_models.PeakOf(module, seen), ticks], **memory_models.QUIET,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data, size))
        return trainer._run.auto and trainer._run.auto.decision, seen[0], ticks.median()

    with torchhal_simulator.simulate(devices=devices, memory=limit):
        planner = []
        make = planning._make_planner
        planning._make_planner = lambda *given: planner.append(make(*given)) or planner[0]
        decision, peak, _ = fit("auto")
        rows = None
        if planner:
            rows = [
                (row.option.argument, row.name, row.fused, planner[0]._batches(row), row.phases.peak)
                for row in planner[0]._rows()
                if row.phases is not None and row.phases.peak <= limit
            ]
            planner.clear()
        gc.collect()
        rows = gather(rows, devices)[0]
        times: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        for _ in range(rounds):
            for argument, label, fused, batches, _predicted in rows:
                if label in failed:
                    continue
                try:
                    times.setdefault(label, []).append(fit(argument, fused=fused, batches=batches)[2])
                except Exception as error:
                    failed[label] = f"{type(error).__name__}: {error}"[:200]
                    release_frames(error)
                gc.collect()
    mine = {"peak": peak, "times": {label: min(found) for label, found in times.items() if found}, "failed": failed}
    everybody = gather(mine, devices)
    if int(os.environ.get("RANK", "0")) == 0:
        failed = {label: why for each in everybody for label, why in each["failed"].items()}
        label = decision["name"]
        print(
            json.dumps(
                {
                    "pick": label,
                    "predicted": {label: predicted for _, label, _, _, predicted in rows},
                    "peak": max(each["peak"] for each in everybody),
                    "times": {
                        label: max(each["times"].get(label, 0) for each in everybody)
                        for label in times
                        if label not in failed
                    },
                    "failed": failed,
                }
            )
        )


def gather(value, devices):
    """Exchange values between two runs, when the process group of none is there."""
    if devices == 1:
        return [value]
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = [None] * devices
    dist.all_gather_object(found, value)
    dist.destroy_process_group()
    return found


class Ticks(Callback):
    """Times optimizer steps."""

    def __init__(self):
        self.seen = []
        self.step = 0

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.seen.append(time.perf_counter())

    def median(self):
        return statistics.median(later - earlier for earlier, later in zip(self.seen[1:], self.seen[2:], strict=False))


def report(combination: str, found: dict, margin: float) -> bool:
    name, devices, memory = combination.split("/")
    pick, limit = found["pick"], float(memory) * 1e6
    predicted = found["predicted"][pick]
    fitting = {
        label: seconds for label, seconds in found["times"].items() if found["predicted"][label] * (1 + margin) <= limit
    }
    fastest = min(fitting, key=fitting.__getitem__)
    peak, ratio = found["peak"] / predicted, found["times"][pick] / fitting[fastest]
    print(
        f"| {name} | {devices} | {memory} MB | {pick} | {predicted / 1e6:.1f} | {found['peak'] / 1e6:.1f} "
        f"| {peak:.2f} | "
        f"{found['times'][pick] * 1e3:.1f} | {fastest} | {fitting[fastest] * 1e3:.1f} | {ratio:.2f} |",
        flush=True,
    )
    return peak <= PEAK_BOUND and ratio <= TIME_BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=COMBINATIONS, metavar="MODEL/DEVICES/MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.rounds, arguments.steps)
        return
    from torchhal.trainer.planning._choice import MARGIN

    print("| model | devices | memory | pick | predicted MB | peak MB | ratio | ms a step | fastest | ms | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    good = [report(each, run(each, arguments.rounds, arguments.steps), MARGIN) for each in arguments.only]
    print(f"{sum(good)} of {len(good)} within {PEAK_BOUND}x of the predicted peak and {TIME_BOUND}x of the fastest")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
