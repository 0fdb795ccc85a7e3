"""Image classification."""

import tasks
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = tasks.conv_net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(tasks.images(), tasks.BATCH)
validation = DataLoader(tasks.images(50, seed=2), tasks.BATCH)
device = torch.device("cpu")
mean = torch.tensor([0.4, 0.45, 0.5], device=device)
deviation = torch.tensor([1.0, 1.1, 1.2], device=device)

for epoch in range(tasks.EPOCHS):
    model.train()
    for images, labels in loader:
        images = (images - mean[:, None, None]) / deviation[:, None, None]
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tasks.record(loss)

    model.eval()
    hits = total = 0
    for images, labels in validation:
        images = (images - mean[:, None, None]) / deviation[:, None, None]
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        hits += int((predictions == labels).sum())
        total += len(labels)
    print(f"epoch {epoch}: {hits} of {total} right")

tasks.finish(hits=hits, total=total)
