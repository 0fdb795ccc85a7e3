"""Callbacks that are each broken in one way."""

import threading

import torch
from zoo import caught_by

from torchhal import Callback


@caught_by("CBK-01")
class WantsValidation(Callback):
    """Reads a metric that a fit without validation doesn't have."""

    def on_train_epoch_end(self, trainer, module):
        float(trainer.callback_metrics["val_loss"])


@caught_by("CBK-01")
class WantsOptimizers(Callback):
    """Counts on a fit in a hook of every call."""

    def setup(self, trainer, module, stage):
        self.stage = stage

    def teardown(self, trainer, module, stage):
        if stage == "validate":
            self.lr = trainer.fit_loop.optimizers[0].param_groups[0]["lr"]


class Best:
    """What a checkpoint should not have to know."""


@caught_by("CBK-02", says="weights_only load would refuse")
class KeepsObjects(Callback):
    """Has an object in its state."""

    def state_dict(self):
        return {"best": Best()}


@caught_by("CBK-02")
class ForgetsAPart(Callback):
    """Loads less than it saves."""

    losses = ()
    count = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1
        self.losses = (*self.losses, self.count)

    def state_dict(self):
        return {"count": self.count, **({"losses": list(self.losses)} if self.losses else {})}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


@caught_by("CBK-02", says="the state's 'count' after it was loaded")
class LoadsNothing(Callback):
    """Saves its count, and begins at zero where it is loaded."""

    count = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        pass


@caught_by("CBK-03")
class CountsOn(Callback):
    """Ends training after so many steps, of all fits together."""

    steps = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        if self.steps == 12:
            trainer.should_stop = True


@caught_by("CBK-04")
class HasALock(Callback):
    """Guards what it collects."""

    def on_fit_start(self, trainer, module):
        self.lock = threading.Lock()


@caught_by("CBK-05", says="differ between ranks")
class ChangesOneRank(Callback):
    """Clips the weights where it prints."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.99)


@caught_by("CBK-06")
class WarmsUpAgain(Callback):
    """Counts steps for its learning rate, and keeps the count in no checkpoint."""

    def on_fit_start(self, trainer, module):
        self.steps = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.steps += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / self.steps
