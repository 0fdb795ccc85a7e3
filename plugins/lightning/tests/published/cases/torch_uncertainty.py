"""A ClassificationRoutine of torch_uncertainty, by its TUTrainer, with a mixup of batches."""

import lightning.pytorch as pl
import noted
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty import TUTrainer
from torch_uncertainty.routines import ClassificationRoutine

PACKAGES = ["torch-uncertainty"]


def dataset(number):
    inputs = torch.randn(number, 6)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


noted.seed()
training, validation = dataset(96), dataset(32)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
routine = ClassificationRoutine(
    model,
    num_classes=3,
    loss=nn.CrossEntropyLoss(),
    optim_recipe=torch.optim.Adam(model.parameters(), lr=1e-2),
    mixup_params={"mixtype": "mixup", "mixup_alpha": 0.2},
)
trainer = TUTrainer(
    max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, callbacks=[noted.callback(pl)],
)  # fmt: skip
trainer.fit(routine, DataLoader(training, 16, shuffle=True), DataLoader(validation, 16))
trainer.test(routine, DataLoader(validation, 16), verbose=False)
