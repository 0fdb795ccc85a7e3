"""A checkpoint in the midst of an epoch, with shuffled batches and dropout."""

import tasks
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = tasks.mlp(dropout=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(tasks.vectors(), tasks.BATCH, shuffle=True)
first_epoch = batches_done = 0
if tasks.RESUMES:
    saved = torch.load(tasks.FOLDER / "plain.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first_epoch, batches_done = saved["position"]

for epoch in range(first_epoch, tasks.EPOCHS):
    for index, (inputs, labels) in enumerate(loader, 1):
        if index <= batches_done:
            continue
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tasks.record(loss)
        if (epoch, index) == tasks.SAVE_AT:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "position": (epoch, index)}
            torch.save(state, tasks.FOLDER / "plain.pt")
    batches_done = 0

tasks.finish()
