"""Ctrl-C in the midst of an epoch; and the strategy without the Trainer."""

import os
import signal
import tempfile

import torch
from modelling import Net, difference, loader, made, plain, trainer

import poptorch
from torchhal import Callback, ModelCheckpoint
from torchhal.resolve import Request, resolve


class Interrupt(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted():
    folder = tempfile.mkdtemp()
    whole = made(Net, "adamw", "step")
    trainer().fit(whole, loader(16))
    keep = ModelCheckpoint(dirpath=folder)
    run = trainer(enable_checkpointing=True, callbacks=[keep, Interrupt()])
    try:
        run.fit(made(Net, "adamw", "step"), loader(16))
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("fit went on")
    assert run.global_step == 9 and poptorch._poplar_executor.machine.free() == 4
    resumed = made(Net, "adamw", "step")
    again = trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(dirpath=folder)])
    again.fit(resumed, loader(16), ckpt_path="last")
    assert again.global_step == 12 and difference(resumed, whole) == 0


def without_the_trainer():
    strategy = resolve(Request(accelerator="ipu", devices=2)).build()
    model, reference = made(Quiet), made()
    strategy.setup_environment()
    try:
        strategy.connect(model)
        strategy.setup_model()
        strategy.setup_optimizers([model.configure_optimizers()])
        step = strategy.step_function("training_step")
        batches = strategy.process_dataloader(loader(8), training=True)
        for _ in range(2):
            for index, batch in enumerate(batches):
                strategy.backward(step(strategy.batch_to_device(batch), index))
                assert strategy.optimizer_step(strategy.optimizers[0]).steps == 1
        state = strategy.module_state_dict()
        strategy.restore_module()
    finally:
        strategy.teardown()
    plain(reference, 16)
    assert difference(model, reference) < 2e-6
    assert max(float((state[name] - value).abs().max()) for name, value in model.state_dict().items()) == 0


class Quiet(Net):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


if __name__ == "__main__":
    interrupted()
    without_the_trainer()
