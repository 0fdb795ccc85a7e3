"""A generator and a discriminator, each with its optimizer."""

import tasks
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torchhal

run = torchhal.Run(accelerator="cpu")
torch.manual_seed(0)
generator, discriminator = tasks.generator_net(), tasks.discriminator_net()
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
loader = DataLoader(tasks.points(), tasks.BATCH)
generator, discriminator, optimizer_g, optimizer_d, loader = run.setup(
    generator, discriminator, optimizer_g, optimizer_d, loader
)

for _ in range(tasks.EPOCHS):
    for real, noise in loader:
        ones, zeros = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)
        fake = generator(noise)

        optimizer_d.zero_grad()
        judged = discriminator(torch.cat([real, fake.detach()]))
        loss_d = F.binary_cross_entropy_with_logits(judged, torch.cat([ones, zeros]))
        run.backward(loss_d)
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        run.backward(loss_g)
        optimizer_g.step()
        tasks.record(loss_d + loss_g)

tasks.finish()
