"""Text classification."""

import tasks
import torch
from torch.utils.data import DataLoader

import torchhal

run = torchhal.Run(accelerator="cpu")
torch.manual_seed(0)
model = tasks.bert()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(tasks.sentences(), tasks.BATCH)
validation = DataLoader(tasks.sentences(50, seed=1), tasks.BATCH)
model, optimizer, loader, validation = run.setup(model, optimizer, loader, validation)

for epoch in range(tasks.EPOCHS):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        run.backward(loss)
        optimizer.step()
        tasks.record(loss)

    model.eval()
    hits = total = 0
    for batch in validation:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, labels = run.gather((predictions, batch["labels"]))
        hits += int((predictions == labels).sum())
        total += len(labels)
    run.print(f"epoch {epoch}: {hits} of {total} right")

tasks.finish(hits=hits, total=total)
