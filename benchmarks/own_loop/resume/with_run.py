"""A checkpoint in the midst of an epoch, with shuffled batches and dropout."""

import tasks
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torchhal

run = torchhal.Run(accelerator="cpu")
torch.manual_seed(0)
model = tasks.mlp(dropout=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(tasks.vectors(), tasks.BATCH, shuffle=True)
ckpt_path = tasks.FOLDER / "run.ckpt" if tasks.RESUMES else None
model, optimizer, loader = run.setup(model, optimizer, loader, ckpt_path=ckpt_path)

for epoch in range(run.current_epoch, tasks.EPOCHS):
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        tasks.record(loss)
        if (epoch, run.global_step % len(loader)) == tasks.SAVE_AT:
            run.save_checkpoint(tasks.FOLDER / "run.ckpt")

tasks.finish()
