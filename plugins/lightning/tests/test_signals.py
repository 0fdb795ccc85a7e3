"""A signal stops a run, whose only callback that saves is Lightning's, at a step; the next start goes on after it."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest
from lightning_models import dataset, fit, made, models
from torch.utils.data import DataLoader

import torchhal

SCRIPT = """
import sys
import time
import {tree} as pl
import torch
import torchhal
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    first = None

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        if self.first is None:
            self.first = batch_idx
            print(f"FIRST {{self.global_step}} {{batch_idx}}", flush=True)
        if self.trainer.is_global_zero:
            Path("at").write_text(str(self.global_step))
        time.sleep(0.02)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer_of = {{"bridge": torchhal.Trainer, "facade": pl.Trainer}}[sys.argv[1]]
    trainer = trainer_of(
        accelerator="cpu", devices=int(sys.argv[2]), max_epochs=int(sys.argv[3]), enable_progress_bar=False,
        enable_model_summary=False, callbacks=[pl.callbacks.ModelCheckpoint()],
        logger=pl.loggers.CSVLogger(".") if sys.argv[1] == "facade" else False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(64, 2)), 2), ckpt_path="last")
    print("END", trainer.global_step)
"""


@pytest.mark.timeout(170)
@pytest.mark.parametrize(("way", "devices"), [("bridge", 1), ("facade", 2)])
def test_a_signal_saves_and_last_goes_on(pl, tmp_path, way, devices):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tree=pl.__name__)))
    by = ["-m", "torchhal_lightning"] if way == "facade" else []
    command = [sys.executable, *by, script.name, way, str(devices)]
    with subprocess.Popen([*command, "99"], cwd=tmp_path, stdout=-1, stderr=subprocess.STDOUT, text=True) as job:
        try:
            end = time.monotonic() + 90
            while not (tmp_path / "at").exists() and job.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(1)
            job.send_signal(signal.SIGTERM)
            said, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 128 + signal.SIGTERM, said
    (saved,) = tmp_path.glob("**/interrupted-*.ckpt")
    step = int(saved.stem.rpartition("=")[2])
    assert saved.name in said and int((tmp_path / "at").read_text()) == step - 1
    per_epoch = 32 // devices
    epochs = step // per_epoch + 1
    done = subprocess.run(
        [*command, str(epochs)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"FIRST {step} {step % per_epoch}" in done.stdout and f"END {epochs * per_epoch}" in done.stdout, done.stdout


def test_the_best_one_is_lightnings(pl, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = fit(torchhal.Trainer, made(models(pl)["Plain"]), callbacks=[saver], enable_checkpointing=True)
    (loss,) = trainer.validate(dataloaders=DataLoader(dataset(24, 6), 8), ckpt_path="best", verbose=False)
    assert loss["val_loss"] == pytest.approx(float(saver.best_model_score))
    assert [type(each) for each in trainer.checkpoint_callbacks] == [pl.callbacks.ModelCheckpoint]
