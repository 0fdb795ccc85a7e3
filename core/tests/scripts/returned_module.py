"""Check that a module comes back from workers as they had it: ``returned_module.py FOLDER STRATEGY PRECISION``.

It is a process of its own, since a fork can't run a backward if its parent ran its first one after the simulator was
loaded: autograd's threads for the device were started then, and torch refuses to work without them.
"""

import sys

import torch

from torchhal import ModelCheckpoint, Module, Trainer


class Buffered(Module):
    """A module with tensors of many kinds, some of them tied and some in no state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 3)
        self.tied = torch.nn.Linear(3, 3)
        self.tied.weight = self.layer.weight
        self.wave = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.average += self.layer.bias.detach() / 3
        return (self.tied(self.layer(batch)) * self.wave.abs()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder, strategy, precision):
    def fit(strategy, devices):
        model = Buffered()
        trainer = Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, precision=precision, max_epochs=1, logger=False,
            callbacks=[ModelCheckpoint(folder, strategy)], enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        dtype = {"64": torch.float64, "bf": torch.bfloat16, "32": torch.float32}[precision[:2]]
        rows = torch.randn(16, 3, generator=torch.Generator().manual_seed(9))
        trainer.fit(model, torch.utils.data.DataLoader(rows.to(dtype), 4))
        return model

    def dtypes(model):
        return {name: each.dtype for name, each in (*model.named_parameters(), *model.named_buffers())}

    model = fit(strategy, 2)
    alone = dtypes(fit("single_device", 1))
    assert dtypes(model) == alone, (dtypes(model), alone)
    assert model.tied.weight is model.layer.weight
    saved = torch.load(f"{folder}/{strategy}.ckpt", weights_only=True)["state_dict"]
    differ = [name for name, value in model.state_dict().items() if not torch.equal(value, saved[name])]
    assert not differ, differ


if __name__ == "__main__":
    main(*sys.argv[1:])
