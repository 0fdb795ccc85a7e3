"""What a case imports: the Trainer that it is to use, and a callback that notes what a training does.

``pl`` is the tree whose classes the case has: ``lightning.pytorch`` or ``pytorch_lightning``. At its end the process
prints one line, ``NOTED`` and JSON: each batch's loss, the metrics of each epoch and the weights after the training.
"""

from __future__ import annotations

import atexit
import json
import os
import random
from types import ModuleType
from typing import Any

import numpy as np
import torch

PREFIX = "NOTED "
QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False,
}  # fmt: skip

_notes: dict[str, Any] = {"trainer": [], "losses": [], "epochs": [], "weights": []}


def seed(number: int = 1) -> None:
    """Begin all random numbers anew."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def trainer(pl: ModuleType, **options: Any) -> Any:
    """Return a quiet Trainer whose callbacks begin with one that notes: Lightning's, or by the bridge torchhal's."""
    if os.environ.get("PUBLISHED_TRAINER") == "bridge":
        import torchhal

        cls: Any = torchhal.Trainer
    else:
        cls = pl.Trainer  # the facade, where Lightning's is exchanged
    return cls(**{**QUIET, **options, "callbacks": [callback(pl), *options.get("callbacks", ())]})


def callback(pl: ModuleType) -> Any:
    """Return the callback that notes, for a library that makes its Trainer itself."""

    class Notes(pl.Callback):  # type: ignore[name-defined]
        def on_train_start(self, trainer, pl_module):
            _notes["trainer"] = [each.__module__ for each in type(trainer).__mro__]
            self.begun = False

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is None:  # manual optimization
                with torch.no_grad():
                    loss = sum(p.double().abs().sum() for p in pl_module.parameters())
            _notes["losses"].append(float(loss))

        def on_train_epoch_start(self, trainer, pl_module):
            if self.begun:
                self.note_epoch(trainer)
            self.begun = True

        def on_train_end(self, trainer, pl_module):
            """Note what hooks have logged at the last epoch's end, too."""
            self.note_epoch(trainer)
            _notes["weights"].append(sum(float(p.detach().double().abs().sum()) for p in pl_module.parameters()))

        def note_epoch(self, trainer):
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            _notes["epochs"].append(dict(sorted(metrics.items())))

    return Notes()


@atexit.register
def report() -> None:
    """Print what was noted, in one line."""
    print(f"\n{PREFIX}{json.dumps(_notes)}", flush=True)
