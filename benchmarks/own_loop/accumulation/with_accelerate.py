"""Three batches of an optimizer step, and gradients that are clipped."""

import tasks
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
torch.manual_seed(0)
model = tasks.mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(tasks.vectors(), tasks.BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(tasks.EPOCHS):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        tasks.record(loss)

tasks.finish()
