"""Three batches of an optimizer step, and gradients that are clipped."""

import tasks
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = tasks.mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(tasks.vectors(), tasks.BATCH)

for _ in range(tasks.EPOCHS):
    for index, (inputs, labels) in enumerate(loader, 1):
        loss = F.cross_entropy(model(inputs), labels)
        (loss / 3).backward()
        if index % 3 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        tasks.record(loss)

tasks.finish()
