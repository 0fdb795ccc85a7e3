"""The callback FinetuningScheduler, which thaws a model's parts one after the other when validation stops improving."""

import lightning.pytorch as pl
import noted
import torch
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint, FTSEarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ["finetuning-scheduler"]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1]), prog_bar=True)

    def configure_optimizers(self):
        parameters = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def dataset(number):
    inputs = torch.randn(number, 6)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


noted.seed()
training, validation = dataset(64), dataset(32)
schedule = {
    0: {"params": ["head.bias", "head.weight"], "max_transition_epoch": 1},
    1: {"params": ["body.2.bias", "body.2.weight"], "max_transition_epoch": 3, "lr": 1e-3},
    2: {"params": ["body.0.bias", "body.0.weight"], "lr": 1e-4},
}
callbacks = [
    FinetuningScheduler(ft_schedule=schedule),
    FTSEarlyStopping(monitor="val_loss", patience=2),
    FTSCheckpoint(monitor="val_loss", save_top_k=2),
]
trainer = noted.trainer(pl, max_epochs=6, enable_checkpointing=True, callbacks=callbacks)
trainer.fit(Net(), DataLoader(training, 16, shuffle=True), DataLoader(validation, 16))
