"""Three batches of an optimizer step, and gradients that are clipped."""

import tasks
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torchhal

run = torchhal.Run(accelerator="cpu", accumulate_grad_batches=3)
torch.manual_seed(0)
model = tasks.mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(tasks.vectors(), tasks.BATCH)
model, optimizer, loader = run.setup(model, optimizer, loader)

for _ in range(tasks.EPOCHS):
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        run.backward(loss)
        run.clip_gradients(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        tasks.record(loss)

tasks.finish()
