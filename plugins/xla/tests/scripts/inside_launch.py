"""A Trainer inside torch_xla's own launcher."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from xla_training import Net, batches, trainer


def train(index):
    run = trainer("single_xla", devices=1)
    run.fit(Net(), batches(4))
    print(f"trained {run.global_step} steps", flush=True)


if __name__ == "__main__":
    import torch_xla

    torch_xla.launch(train)
