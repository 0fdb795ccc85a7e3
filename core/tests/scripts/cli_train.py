"""Train by TrainerCLI; each process that parses a command line adds a line to the file ``parses``.

    python cli_train.py fit --trainer.strategy ddp_spawn

With ``CLI_TRAIN_LR_OF_RANK`` set, each rank is given another learning rate.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cli_models import Data, Net

from torchhal import TrainerCLI

DEFAULTS = {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}


class CountingCLI(TrainerCLI):
    def run(self, args=None):
        with open("parses", "a") as file:
            file.write(f"{os.getpid()}\n")
        if "CLI_TRAIN_LR_OF_RANK" in os.environ:
            sys.argv.append(f"--model.lr=0.{int(os.environ['RANK']) + 1}")
        return super().run(args)


if __name__ == "__main__":
    cli = CountingCLI(Net, Data, trainer_defaults=DEFAULTS)
    cli.run()
    print("steps", cli.trainer.global_step)
