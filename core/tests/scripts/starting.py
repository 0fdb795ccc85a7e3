"""A training job that a test stops at its start: ``starting.py '{"out": DIR, "strategy": "ddp", "at": "setup"}'``.

The ranks in "ranks" note DIR/rank<r>.json and sleep in the hook "at"; without one the job trains until it is stopped.
DIR/begun is there when the first process has imported torchhal, and DIR/begun<r> when a rank has that knows its rank
then; DIR/trained when a rank has begun a training step, and DIR/pid<r>.json when a rank has come to its set-up.
"""

import json
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer


class Net(Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(4, 1)

    def rest(self, where):
        rank = int(os.environ.get("RANK", "0"))
        if self.config.get("at") != where or rank not in self.config["ranks"]:
            return
        self.note("rank")
        try:
            time.sleep(600)
        finally:
            with open(f"{self.config['out']}/cleaned{rank}", "w"):
                pass

    def note(self, name):
        rank = os.environ.get("RANK", "0")
        part = f"{self.config['out']}/part{rank}"
        with open(part, "w") as file:
            json.dump({"pid": os.getpid()}, file)
        os.replace(part, f"{self.config['out']}/{name}{rank}.json")

    def prepare_data(self):
        self.rest("prepare_data")

    def setup(self, stage):
        self.note("pid")
        self.rest("setup")

    def configure_optimizers(self):
        self.rest("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_fit_start(self):
        self.rest("on_fit_start")

    def on_train_start(self):
        self.rest("on_train_start")

    def training_step(self, batch, batch_idx):
        open(f"{self.config['out']}/trained", "w").close()
        time.sleep(0.05)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.rest("validation_step")


def main():
    config = json.loads(sys.argv[1])
    open(f"{config['out']}/begun{os.environ.get('RANK', '')}", "w").close()
    data = DataLoader(TensorDataset(torch.ones(64, 4)), 4)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=config["strategy"], max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=config["out"],
    )  # fmt: skip
    trainer.fit(Net(config), data, data)


if __name__ == "__main__":
    main()
