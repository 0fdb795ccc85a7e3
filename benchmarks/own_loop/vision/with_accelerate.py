"""Image classification."""

import tasks
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = tasks.conv_net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(tasks.images(), tasks.BATCH)
validation = DataLoader(tasks.images(50, seed=2), tasks.BATCH)
model, optimizer, loader, validation = accelerator.prepare(model, optimizer, loader, validation)
mean = torch.tensor([0.4, 0.45, 0.5], device=accelerator.device)
deviation = torch.tensor([1.0, 1.1, 1.2], device=accelerator.device)

for epoch in range(tasks.EPOCHS):
    model.train()
    for images, labels in loader:
        images = (images - mean[:, None, None]) / deviation[:, None, None]
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        tasks.record(loss)

    model.eval()
    hits = total = 0
    for images, labels in validation:
        images = (images - mean[:, None, None]) / deviation[:, None, None]
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        hits += int((predictions == labels).sum())
        total += len(labels)
    accelerator.print(f"epoch {epoch}: {hits} of {total} right")

tasks.finish(hits=hits, total=total)
