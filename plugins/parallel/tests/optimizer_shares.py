"""In a rank of a test's world: train where each rank steps a share of the parameters, which may be none."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Trainer


class Head(torchhal.Module):
    """A frozen layer and a trained one of two parameters, whose loss overflows float16 in the first steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)
        self.rates, self.averages = [], {}

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return F.mse_loss(self.head(self.body(batch[0])), batch[1]) * 30

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.head.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Averaging(Head):
    """Keeps a moving average of its weights in a hook of the optimizer's step, which then limits them."""

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        configured["optimizer"].register_step_post_hook(self.follow)
        return configured

    @torch.no_grad()
    def follow(self, optimizer, args, kwargs):
        for name, parameter in self.head.named_parameters():
            average = self.averages.setdefault(name, torch.zeros_like(parameter))
            average.lerp_(parameter, 0.5)
            parameter.clamp_(-0.3, 0.3)


def trained(strategy, model, precision, devices):
    """Return (weights, moving averages, learning rates, steps) of this rank."""
    module = {"Head": Head, "Averaging": Averaging}[model]()
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, precision=precision, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(2)) * 20
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return weights, module.averages, module.rates, trainer.global_step


def refused_ignored():
    """Return the error for a parameter that DistributedDataParallel is told to ignore."""
    module = Head()
    module._ddp_params_and_buffers_to_ignore = ["head.bias"]
    trainer = Trainer(accelerator="cpu", strategy="zero1", devices=2, max_epochs=1, logger=False)
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 8), torch.ones(8, 1)), batch_size=4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
