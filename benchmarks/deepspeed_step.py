"""A training step of each stage of DeepSpeed through torchhal, as a ratio to the same engine driven by hand.

    python benchmarks/deepspeed_step.py [--steps 60] [--rounds 5]

Two processes on the CPU, over gloo. In each round the raw loop and the Trainer's train the same model on the same
batches, one after the other, so that a slow moment of the machine falls on both. The ratio is that of the fastest
tenths of all steps: what they take where nothing else runs. Nothing here is a bound.
"""

import argparse
import os
import subprocess
import sys

STAGES = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2 offload": {"stage": 2, "offload_optimizer": "cpu"},
    "3": {"stage": 3},
    "3 offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}


def worker(steps: int, rounds: int) -> None:
    import torch
    from step_model import QUIET, Clock, Model, Times, dataset, fastest
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    from torchhal import Trainer
    from torchhal_deepspeed.strategy import DeepSpeedStrategy

    torch.set_num_threads(1)
    data = dataset(steps)

    def through_torchhal(options: dict, times: list[float]) -> None:
        trainer = Trainer(strategy=DeepSpeedStrategy(**options), callbacks=[Times(times)], **QUIET)
        trainer.fit(Model(), DataLoader(data, 16))

    def by_hand(options: dict, times: list[float]) -> None:
        """The same engine, with the configuration and over the communication that the strategy gives it."""
        strategy = Trainer(strategy=DeepSpeedStrategy(**options), **QUIET).strategy
        strategy.setup_environment()
        try:
            import deepspeed

            model = Model()
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=model.configure_optimizers(), config=strategy.engine_config(),
                dist_init_required=False,
            )  # fmt: skip
            sampler = torch.utils.data.DistributedSampler(data, **strategy.distributed_sampler_kwargs)
            clock = Clock(times)
            for index, (x, y) in enumerate(DataLoader(data, 16, sampler=sampler)):
                clock.batch(index)
                engine.backward(F.mse_loss(engine(x), y))
                engine.step()
            engine.destroy()
        finally:
            strategy.teardown()

    for name, options in STAGES.items():
        raw: list[float] = []
        ours: list[float] = []
        for _ in range(rounds):
            by_hand(options, raw)
            through_torchhal(options, ours)
        if os.environ["RANK"] == "0":
            mine, theirs = fastest(ours), fastest(raw)
            print(f"stage {name:10} {theirs:8.2f} ms by hand {mine:8.2f} ms {mine / theirs:6.3f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.steps, arguments.rounds)
        return
    numbers = ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "--worker", *numbers]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
    sys.exit(subprocess.run([sys.executable, *command], env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
