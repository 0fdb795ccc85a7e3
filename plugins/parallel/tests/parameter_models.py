"""A small transformer with a plan, how it is trained, and how its weights are compared, for tests of parameters."""

import models
import torch
import training
from torch import nn

DIVIDED = ["zero2", "zero3", "tensor_parallel"]


class Net(models.Base):
    """Two blocks of which each is a unit, an embedding and a head outside of them, and a layer that nothing divides."""

    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_rep"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def fit(module, strategy, devices, callbacks=(), batches=4, **options):
    """Train ``module`` for two epochs, and return its weights."""
    trainer = training.small(strategy, devices, callbacks=list(callbacks), max_epochs=2, **options)
    module.train_dataloader = lambda: training.loader(trainer, models.Transformer, batches=batches)
    trainer.fit(module)
    return {name: value.clone() for name, value in module.state_dict().items()}


def outcome(make, strategy, devices):
    """Return the weights of the model that ``make`` builds after a fit, or (the error's name, its words)."""
    try:
        return fit(make(), strategy, devices)
    except Exception as error:
        return type(error).__name__, str(error)


def check_alike(world, final, name, strategy, reference):
    """Compare every rank's weights with those of ``reference``: "ddp", or one device on the joined batch.

    ``final`` is the function ``(name, strategy, devices)`` of the test module that has the model ``name``.
    """
    expected = world.run(final, name, "ddp", 2)[0] if reference == "ddp" else final(name, "single_device", 1)
    for found in world.run(final, name, strategy, 2, timeout=60):
        assert isinstance(found, dict), found
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=key)
    return expected
