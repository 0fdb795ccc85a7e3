"""A script that fits a small model with a logger, run as a process of its own.

    python logged_fit.py LOGGER FOLDER [strategy=...] [devices=...] [epochs=...] [kill_at=STEP]

``LOGGER`` is JSON: ``{"mlflow": {"tracking_uri": ...}}``. Prints how long the fit took, and what was warned about.
"""

import json
import os
import signal
import sys
import time
import warnings

import torch
from ledger import LedgerLogger

from torchhal import Callback, Module, Trainer


class Model(Module):
    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class KillAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    ((name, options),) = json.loads(sys.argv[1]).items()
    folder = sys.argv[2]
    arguments = dict(argument.split("=", 1) for argument in sys.argv[3:])
    options = {"save_dir": folder, **options}
    logger = LedgerLogger(**options) if name == "ledger" else {name: options}
    loader = torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", strategy=arguments.get("strategy", "auto"), devices=int(arguments.get("devices", 1)),
        max_epochs=int(arguments.get("epochs", 2)), logger=logger, log_every_n_steps=1, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[KillAt(int(arguments["kill_at"]))] if "kill_at" in arguments else None,
    )  # fmt: skip
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Model(), loader, loader)
    said = [str(warning.message) for warning in caught if str(warning.message).startswith(name)]
    print(f"took {time.monotonic() - start:.1f} s, {len(said)} warnings", *said)


if __name__ == "__main__":
    main()
