"""What is logged with ``sync_dist``: over all samples, of which ranks that share a batch count theirs once."""

import pytest
import torch
from torch import nn

from torchhal import Module, Trainer

SAMPLES = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Counting(Module):
    tensor_parallel_plan = {"layers.0": "colwise", "layers.2": "rowwise"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        loss = self(batch).pow(2).mean()
        self.log("samples", float(len(batch)), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
        self.log("on_device", torch.tensor(len(batch)), reduce_fx="sum", sync_dist=True)
        self.log("mean", batch.mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def logged(strategy, devices):
    from training import build

    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=build(*strategy), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Counting(), torch.utils.data.DataLoader(SAMPLES, 4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


CASES = [
    (("zero1", None), 2, 2),
    (("zero3", None), 2, 2),
    (("pipeline", None), 2, 1),
    (("hybrid", {"tensor": 2}), 2, 1),
    (("hybrid", {"data": 2, "tensor": 2}), 4, 2),
    (("hybrid", {"shard": 2, "pipeline": 2}), 4, 2),
]


@pytest.mark.parametrize("strategy, devices, replicas", CASES, ids=str)
def test_sums_and_means_are_over_all_samples(request, strategy, devices, replicas):
    expected = Counting()(SAMPLES).pow(2).mean().item()
    for metrics in request.getfixturevalue(f"world{devices}").run(logged, strategy, devices, timeout=100):
        assert metrics["samples_step"] == metrics["on_device"] == 4 * replicas
        assert metrics["samples_epoch"] == 16
        assert metrics["mean"] == pytest.approx(SAMPLES.mean().item(), abs=1e-6)
        assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
