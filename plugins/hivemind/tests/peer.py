"""One peer of a run, as a script: ``peer.py FOLDER OPTIONS`` where OPTIONS is JSON.

While it trains, FOLDER/log gets a line for each epoch of the collaboration: ``step epoch rate loss``. FOLDER/addresses
has its addresses, FOLDER/states the model right after each epoch. It ends when somebody makes FOLDER/stop.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from torchhal import Module, Trainer
from torchhal.trainer.callbacks import Callback, ModelCheckpoint
from torchhal_hivemind.strategy import HivemindStrategy

FAST = {
    "matchmaking_time": 0.5,
    "request_timeout": 0.2,
    "averaging_timeout": 10.0,
    "refresh_period": 0.1,
    "peer_expiration": 10.0,
    "join_timeout": 60.0,  # a busy machine takes its time to start a daemon
    "host_addresses": ["/ip4/127.0.0.1/tcp/0"],
}


class Net(Module):
    def __init__(self, seed=0, width=16, optimizer="Adam"):
        super().__init__()
        torch.manual_seed(seed)
        self.optimizer = optimizer
        self.body = nn.Sequential(
            nn.Linear(8, width, bias=False), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1)
        )

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.body(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(seed, count=64, size=8):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(size, 8, generator=generator)
        found.append((x, x.sum(1, keepdim=True) * 0.3 + x[:, :1]))
    return found


class Watch(Callback):
    def __init__(self, folder, pause):
        self.log = (folder / "log").open("a", buffering=1)
        self.folder, self.pause, self.epoch = folder, pause, -1

    def on_train_start(self, trainer, module):
        (self.folder / "addresses").write_text(",".join(trainer.strategy.addresses))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        epoch = trainer.strategy.epoch
        if epoch != self.epoch:
            self.epoch = epoch
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            torch.save(module.state_dict(), self.folder / "states" / "unfinished")
            (self.folder / "states" / "unfinished").rename(self.folder / "states" / f"{epoch}.pt")
            self.log.write(f"{trainer.global_step} {epoch} {rate!r} {float(outputs.detach()):.6f}\n")
        if (self.folder / "stop").exists():
            trainer.should_stop = True
        time.sleep(self.pause)


def main(folder, options):
    folder = Path(folder)
    (folder / "states").mkdir(parents=True)
    seed = options.pop("seed", 0)
    model = Net(seed, **options.pop("model", {}))
    pause = options.pop("pause", 0.05)
    ckpt_path = options.pop("ckpt_path", None)
    trainer_options = {"max_epochs": -1, "max_steps": 10**6, **options.pop("trainer", {})}
    strategy = HivemindStrategy(**{**FAST, **options})
    checkpoint = ModelCheckpoint(dirpath=folder / "checkpoints")
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Watch(folder, pause), checkpoint], **trainer_options,
    )  # fmt: skip
    trainer.fit(model, batches(seed + 1), ckpt_path=ckpt_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
