"""Every function of a Trainer in turn: ``whole_run.py OUT STRATEGY DEVICES [SEED]``; what came of it goes to OUT."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, Module, Trainer


class Net(Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        assert batch[0].device == self.device and self.device.type == "sim"
        assert self.device.index == self.trainer.local_rank
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.body(batch[0]).argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return {"answer": self.body(batch[0]).argmax(1), "rank": self.global_rank}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Where(Callback):
    """The devices on which parameters and the optimizer's state are while they train."""

    found = ()

    def on_train_epoch_end(self, trainer, module):
        state = [value for entry in trainer.optimizers[0].state.values() for value in entry.values()]
        self.found = {str(tensor.device) for tensor in [*module.parameters(), *state] if tensor.dim()}

    def state_dict(self):
        return {"found": sorted(self.found)}

    def load_state_dict(self, state):  # comes back from a worker
        self.found = set(state["found"])


def data():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 5)


def run(strategy, devices):
    model, where = Net(), Where()
    trainer = Trainer(
        accelerator="sim", strategy=strategy, devices=devices, max_epochs=4, callbacks=where, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data(), data())
    return trainer, {
        "loss": trainer.callback_metrics["loss"].cpu(),
        "where": where.found,
        "state": model.state_dict(),
        "validate": trainer.validate(model, data(), verbose=False),
        "test": trainer.test(model, data(), verbose=False),
        "predict": trainer.predict(model, data()),
    }


if __name__ == "__main__":
    out, strategy, devices, *seed = sys.argv[1:]
    torch.manual_seed(int(seed[0]) if seed else 0)
    trainer, result = run(strategy, int(devices))
    if trainer.is_global_zero:
        torch.save(result, out)
