"""A mean variance estimation of lightning_uq_box, which changes its loss after an epoch, and its MC dropout."""

import lightning.pytorch as pl
import noted
import torch
from lightning_uq_box.uq_methods import MCDropoutRegression, MVERegression
from torch import nn
from torch.utils.data import DataLoader, Dataset

PACKAGES = ["lightning-uq-box"]


class Line(Dataset):
    def __init__(self, number):
        self.inputs = torch.rand(number, 1)
        self.targets = self.inputs.sin() + 0.1 * torch.randn(number, 1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"input": self.inputs[index], "target": self.targets[index]}


noted.seed()
training, validation = Line(64), Line(32)
for outputs, method in (
    (2, lambda model: MVERegression(model, burnin_epochs=1)),
    (1, lambda model: MCDropoutRegression(model, num_mc_samples=4, loss_fn=nn.MSELoss())),
):
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, outputs))
    trainer = noted.trainer(pl, max_epochs=3)
    trainer.fit(method(model), DataLoader(training, 16, shuffle=True), DataLoader(validation, 16))
