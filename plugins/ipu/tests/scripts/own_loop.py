"""A loop of a user's own, by torchhal.Run: forward, backward and step are one compiled step."""

import torch
from modelling import Net, difference, loader, made, plain
from torch.nn import functional as F

import torchhal
from torchhal.errors import ConfigurationError


def trained():
    model, reference = made(Net), made(Net)
    optimizer, data = model.configure_optimizers(), loader(8)
    run = torchhal.Run(accelerator="ipu", devices=2)
    run.setup(model, optimizer, data)
    for _ in range(2):
        for batch in run.batches(data):
            optimizer.zero_grad()
            run.forward_backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
            optimizer.step()
    try:
        model(torch.zeros(1, 6))
    except ConfigurationError as error:
        assert "forward_backward" in str(error), error
    else:
        raise AssertionError("a model was called outside of a compiled step")
    steps = run.global_step
    run.end()
    plain(reference, 16)
    print(steps, float(difference(model, reference)))


trained()
