"""A checkpoint in the midst of an epoch, with shuffled batches and dropout."""

import json

import tasks
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = tasks.mlp(dropout=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(tasks.vectors(), tasks.BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first_epoch = batches_done = 0
if tasks.RESUMES:
    accelerator.load_state(tasks.FOLDER / "accelerate")
    first_epoch, batches_done = json.loads((tasks.FOLDER / "accelerate" / "position.json").read_text())

for epoch in range(first_epoch, tasks.EPOCHS):
    batches = accelerator.skip_first_batches(loader, batches_done) if batches_done else loader
    for index, (inputs, labels) in enumerate(batches, batches_done + 1):
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        tasks.record(loss)
        if (epoch, index) == tasks.SAVE_AT:
            accelerator.save_state(tasks.FOLDER / "accelerate")
            (tasks.FOLDER / "accelerate" / "position.json").write_text(json.dumps([epoch, index]))
    batches_done = 0

tasks.finish()
