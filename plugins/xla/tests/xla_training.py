"""Models, data and the plain PyTorch loop that XLA's results are held to."""

import torch
from torch import nn
from torch.nn import functional as F

from torchhal import Module, Trainer


class Net(Module):
    """A small classifier; its log is read by nobody unless a test says so."""

    def __init__(self, *, dropout=0.0, norm=False, optimizer="adamw", schedule=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8) if norm else nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2)
        )
        self.kind = optimizer
        self.schedule = schedule

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
            "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        }
        optimizer = kinds[self.kind](self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count=10, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, 2, (size,), generator=generator))
        for _ in range(count)
    ]


def plain(model, data, *, accumulate=1, clip=None, algorithm="norm"):
    """The loop in plain PyTorch on the CPU; the losses, one per batch."""
    configured = model.configure_optimizers()
    optimizer, scheduler = configured, None
    if isinstance(configured, dict):
        optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    losses = []
    for index, batch in enumerate(data):
        loss = model.loss(batch)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (index + 1) % accumulate and index + 1 < len(data):
            continue
        if clip is not None and algorithm == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        elif clip is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def trainer(strategy="single_xla", **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "max_epochs": 1}  # fmt: skip
    return Trainer(**{"accelerator": "xla", "strategy": strategy, **quiet, **options})


def assert_close(model, reference, tolerance=1e-5):
    for (name, found), (_, expected) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        assert found.device.type == "cpu", name
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)


def assert_equal(model, reference):
    for (name, found), (_, expected) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        assert torch.equal(found, expected), name


class Counts:
    """What torch_xla has compiled, run and read back since this object was made."""

    def __init__(self):
        self.before = self._now()

    @staticmethod
    def _now():
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as met

        xm.wait_device_ops()  # graphs are counted when they have run
        timed = {name: met.metric_data(name)[0] for name in met.metric_names() if met.metric_data(name)}
        reads = met.counter_value("aten::_local_scalar_dense") or 0
        return {
            "compiled": timed.get("CompileTime", 0),
            "run": timed.get("ExecuteTime", 0) + timed.get("ExecuteReplicatedTime", 0),
            "read": timed.get("TransferFromDeviceTime", 0),
            "items": reads,
            # operators without a lowering fall back to the CPU: a read, and a cut, in the midst of a graph
            "fallbacks": sum(met.counter_value(n) for n in met.counter_names() if n.startswith("aten::")) - reads,
        }

    def since(self):
        now = self._now()
        return {name: now[name] - self.before[name] for name in now}


class CountSteps:
    """A callback's hooks: the counts of each training batch, from the first on."""

    def __init__(self):
        self.steps = []

    def on_train_start(self, trainer, module):
        self.counts = Counts()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(self.counts.since())
        self.counts = Counts()
