"""One replica group, as a script: ``replica.py FOLDER OPTIONS`` where OPTIONS is JSON.

FOLDER/log gets a line of JSON for each optimizer step. The run ends at the step that stands in FOLDER/end, and leaves
FOLDER/final.pt. TORCHFT_LIGHTHOUSE says where the others are.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from torchhal import Module, Trainer
from torchhal.precision.mixed import MixedPrecision
from torchhal.trainer.callbacks import Callback, ModelCheckpoint
from torchhal_torchft.strategy import TorchFTStrategy

SIZE, BATCH, GROUPS = 64, 4, 2


class Items(Dataset):
    """Sample number i, which says so."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SIZE, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True) * 0.3 + self.x[:, :1]

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


class Net(Module):
    def __init__(self, seed=0, width=16):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.body(batch[1]).float(), batch[2])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 10, *range(20, 400, 20)], 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_scaler():
    """It grows so often that it overflows, and then steps are skipped."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


class Log(Callback):
    def __init__(self, folder, pause):
        self.folder, self.pause = folder, pause
        self.log = (folder / "log").open("a", buffering=1)
        self.step = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            line = {
                "step": self.step, "epoch": trainer.current_epoch, "batch": batch_idx, "items": batch[0].tolist(),
                "groups": trainer.strategy.participants,
            }  # fmt: skip
            self.log.write(json.dumps(line) + "\n")
        end = self.folder / "end"
        trainer.should_stop = end.exists() and self.step >= int(end.read_text())
        time.sleep(self.pause)

    def on_train_end(self, trainer, module):
        state = {
            "model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "precision": trainer.strategy.precision.state_dict(), "step": trainer.global_step,
            "place": [trainer.current_epoch, trainer.fit_loop.batches_done, trainer.fit_loop.total_batches],
        }  # fmt: skip
        torch.save(state, self.folder / "final.pt")


def main(folder, options):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    model = Net(options.pop("seed", 0), options.pop("width", 16))
    ckpt_path, pause = options.pop("ckpt_path", None), options.pop("pause", 0.1)
    strategy = TorchFTStrategy(
        precision=MixedPrecision("float16", scaler=make_scaler()),
        num_replica_groups=GROUPS,
        # what another group may be late, on a busy machine, is no reason to go on without it
        quorum_timeout=timedelta(seconds=120),
        **options,
    )
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False, max_epochs=-1,
        enable_model_summary=False, max_steps=10**6, gradient_clip_val=1.0,
        callbacks=[Log(folder, pause), ModelCheckpoint(dirpath=folder / "checkpoints")],
    )  # fmt: skip
    trainer.fit(model, DataLoader(Items(), batch_size=BATCH, shuffle=True), ckpt_path=ckpt_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
