"""Two ranks of which one fails, in the way that the argument says."""

import os
import signal
import sys
import time

import torch
from modelling import QUIET, Net, loader, made

from torchhal import Trainer
from torchhal_bagua import BaguaStrategy

HOW = sys.argv[1]


class Failing(Net):
    trainer = None

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.trainer.current_epoch == 1 and batch_idx == 3:
            if HOW == "raises":
                raise ValueError("the batch is bad")
            if HOW == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW == "unused":
                return torch.nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1])
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    options = {} if HOW == "unused" else {"algorithm": "async", "sync_interval_ms": 1}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=BaguaStrategy(**options), max_epochs=200, **QUIET)
    trainer.fit(made(Failing), loader())
