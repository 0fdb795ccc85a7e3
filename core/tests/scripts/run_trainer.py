"""The training of run_straight.py by the Trainer, whose checkpoints are of the same format."""

import json
import sys

import torch
from run_parts import NetModule, make_loader, run_options

from torchhal import Trainer

config = json.loads(sys.argv[1])
torch.manual_seed(config.get("seed", 0))
trainer = Trainer(
    max_epochs=config.get("epochs", 2), logger=False, enable_progress_bar=False, enable_model_summary=False,
    **run_options(config),
)  # fmt: skip
trainer.fit(NetModule(config), make_loader(config), ckpt_path=config.get("ckpt_path"))
