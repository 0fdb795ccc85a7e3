"""Six models whose steps need memory for different reasons, and what their training takes on a simulated device."""

import gc
import itertools

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

from torchhal import Callback, Trainer, registry
from torchhal.memory_estimate import build_model, model_memory
from torchhal.trainer._fake_step import FakeStep


class Trained(nn.Module):
    """Steps by AdamW on (inputs, targets)."""

    batch_size = 64
    precision = "32-true"

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return self.loss(self(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def loss(self, outputs, targets):
        return mse_loss(outputs, targets)


class Deep(Trained):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))
        self.tensor_parallel_plan = {f"layers.{i}": ("rowwise" if i % 2 else "colwise") for i in range(24)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    @staticmethod
    def batch(size):
        return torch.randn(size, 256), torch.randn(size, 256)


class Wide(Trained):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256)) for _ in range(2)
        )
        self.tensor_parallel_plan = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    batch = staticmethod(Deep.batch)


class Conv(Trained):
    batch_size = 16

    def __init__(self):
        super().__init__()
        widths = [3, 32, 32, 64, 64, 64, 64, 64]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets)

    @staticmethod
    def batch(size):
        return torch.randn(size, 3, 16, 16), torch.randint(10, (size,))


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        normed = self.norm1(x)
        parts = (
            layer(normed).view(batch, length, -1, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(attended)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


PLAN = {f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")} | {
    f"blocks.*.{name}": "rowwise" for name in ("out", "down")
}


class Transformer(Trained):
    batch_size = 8
    vocabulary = 2000

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, 192)
        self.blocks = nn.ModuleList(Block(192) for _ in range(4))
        self.norm = nn.LayerNorm(192)
        self.head = nn.Linear(192, self.vocabulary, bias=False)
        self.tensor_parallel_plan = PLAN

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, outputs, targets):
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    @classmethod
    def batch(cls, size):
        return torch.randint(cls.vocabulary, (size, 64)), torch.randint(cls.vocabulary, (size, 64))


class Tied(Transformer):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Embedding(Trained):
    """Nearly all of it is one tensor."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40000, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.tensor_parallel_plan = {"blocks.0": "colwise", "blocks.1": "rowwise"}

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return x

    @staticmethod
    def batch(size):
        return torch.randint(40000, (size, 16)), torch.randn(size, 64)


MODELS = {each.__name__: each for each in (Deep, Wide, Conv, Transformer, Embedding, Tied)}

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def predicted(cls, strategy, world_size):
    """Return the phases of a rank on ``sim``, as ``torchhal explain`` makes them."""
    from torchhal_simulator.accelerator import SimAccelerator

    precision = registry.find("precision", cls.precision).create()
    precision.setup(SimAccelerator(), torch.device("sim", 0))
    module = precision.convert_module(build_model(cls))
    optimizer = module.configure_optimizers()
    step = FakeStep(module, [optimizer], cls.batch(cls.batch_size), device_type="sim", precision=precision)
    model = model_memory(module, [optimizer])
    return strategy.memory_by_phase(strategy.step_memory(step, world_size), model, world_size)


def loader(model):
    return [model.batch(model.batch_size) for _ in range(3)]


def measured_peak(cls, strategy, devices, **options):
    """Train three steps by a Trainer on ``sim``; return the greatest number of bytes this rank has held."""
    import torchhal_simulator

    torchhal_simulator.load()
    torch.manual_seed(0)
    module = torch.get_device_module("sim")
    gc.collect()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    model = cls()
    trainer = Trainer(
        accelerator="sim", strategy=strategy, devices=devices, max_steps=3, use_distributed_sampler=False,
        precision=cls.precision, **QUIET, **options,
    )  # fmt: skip
    trainer.fit(model, loader(model))
    return module.max_memory_allocated() - before


def planned_run(name, devices, limit, steps=3, **options):
    """Train by ``strategy="auto"`` on devices of ``limit`` bytes; return the decision, the peak and the model."""
    import torchhal_simulator

    torchhal_simulator.load()
    with torchhal_simulator.simulate(devices=devices, memory=limit):
        torch.manual_seed(0)
        module = torch.get_device_module("sim")
        gc.collect()
        model = MODELS[name]()
        trainer = Trainer(
            accelerator="sim", devices=devices, max_steps=steps, use_distributed_sampler=False, **QUIET, **options
        )
        seen = []
        trainer.callbacks.append(PeakOf(module, seen))
        trainer.fit(model, loader(model))
        return trainer._run.auto.decision, seen[0], model


class PeakOf(Callback):
    """Measures the device's peak from the set-up to the end of the training."""

    def __init__(self, module, seen):
        self.module, self.seen = module, seen

    def setup(self, trainer, module, stage):
        self.before = self.module.memory_allocated()
        self.module.reset_peak_memory_stats()

    def on_train_end(self, trainer, module):
        self.seen.append(self.module.max_memory_allocated() - self.before)
