"""Define a model that is frozen in part at first, its data, and a callback that saves checkpoints in a run."""

import torch

from torchhal import Callback, Module


class Thawed(Module):
    """A model whose first layer is frozen until the second epoch."""

    def __init__(self, optimizer="adam"):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.layers[0].requires_grad_(False)
        self.optimizer = optimizer
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return (self.layers(batch) - batch.sum(1, keepdim=True)).pow(2).mean()

    def on_train_epoch_start(self):
        self.layers[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.05)
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=8, line_search_fn="strong_wolfe")


def rows(count):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(9))


class SaveAt(Callback):
    """A callback that saves a checkpoint after some of the batches, and in the middle of each validation."""

    def __init__(self, folder, batches):
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.total_batches in self.batches:
            trainer.save_checkpoint(f"{self.folder}/batch{trainer.fit_loop.total_batches}.ckpt")

    def on_validation_epoch_end(self, trainer, module):
        if trainer.fit_loop.total_batches and not trainer.sanity_checking:
            trainer.save_checkpoint(f"{self.folder}/validation{trainer.fit_loop.total_batches}.ckpt")
