"""Make Trainers on the accelerator of the test that write and show nothing."""

import hardware

from torchhal import Trainer
from torchhal.trainer.callbacks import ModelCheckpoint

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def make(*callbacks, **options):
    where = {
        "accelerator": hardware.name(), "devices": 1,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **{**QUIET, **where, "max_epochs": 1, **options})
