"""In a rank of a test's world: small models in two stages, and what is seen of their steps on each rank."""

import os
import types
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Callback, EarlyStopping, ModelCheckpoint, Trainer
from torchhal.trainer.loggers import Logger
from torchhal_parallel._gathering import on_every_rank, on_first_rank
from torchhal_parallel.hybrid import HybridStrategy

SAMPLES, BATCH = 64, 16


class Stack(torchhal.Module):
    """Four layers; forward is cut between the second and the third."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count=SAMPLES):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer(strategy, **options):
    devices = options.pop("devices", 2 if strategy != "single_device" else 1)
    if strategy == "pipeline":
        strategy = HybridStrategy(pipeline=2, microbatches=options.pop("microbatches", 4))
    settings = {
        "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(strategy=strategy, devices=devices, **{**settings, **options})


def floats(metrics):
    return {name: float(value) for name, value in metrics.items()}


# -- values of steps -----------------------------------------------------------------------------------------


class Rows(Logger):
    """Keeps what it is given."""

    name, version, log_dir = "rows", 0, None

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


class Seen(Callback):
    """What this rank sees of a step's value right after each validation's end and at the end."""

    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, module):
        self.values.append((floats(trainer.callback_metrics), trainer.progress_bar_metrics))
        self.leader = trainer.strategy.is_data_leader


class OnPlateau(Stack):
    """The loss of each step decides on its learning rate."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss_step"},
        }

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def values_of_steps(strategy, folder):
    """Everything that shows values of steps: loggers, a checkpoint, early stopping, a plateau, the views."""
    rows, seen = Rows(), Seen()
    keep = ModelCheckpoint(
        dirpath=folder, monitor="loss_step", save_top_k=2, every_n_train_steps=3, filename="{step}-{loss_step:.4f}"
    )
    stop = EarlyStopping("loss_step", patience=1, min_delta=10.0, check_on_train_epoch_end=True)
    run = trainer(
        strategy,
        max_epochs=4,
        logger=rows,
        log_every_n_steps=2,
        enable_checkpointing=True,
        callbacks=[keep, stop, seen],
    )
    module = OnPlateau()
    run.fit(module, DataLoader(samples(), BATCH), DataLoader(samples(16), BATCH))
    return {
        "rows": [(step, metrics) for step, metrics in rows.rows if metrics],
        "kept": {os.path.basename(path): float(score) for path, score in keep.best_k_models.items()},
        "epochs": run.current_epoch,
        "rates": module.rates,
        "seen": seen.values,
        "leader": seen.leader,
    }


def plateau_of_each_rank(strategy):
    """The learning rates where each rank logs a loss of its own data."""
    run = trainer(strategy, max_epochs=3, use_distributed_sampler=False)
    module = OnPlateau()
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    run.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH))
    return module.rates


def begun(path):
    """The loss of each of four steps in one process, of which a checkpoint knows two."""
    losses = []
    for steps in (2, 4):
        run = trainer("single_device", max_steps=steps)
        run.fit(Stack(), DataLoader(samples(), BATCH))
        losses.append(float(run.callback_metrics["loss_step"]))
        if steps == 2:
            run.save_checkpoint(path)
    return losses


def resumed(path):
    """What is shown after two more steps, on this rank."""
    run = trainer("pipeline", max_steps=4, log_every_n_steps=2)
    run.fit(Stack(), DataLoader(samples(), BATCH), ckpt_path=path)
    return float(run.callback_metrics["loss_step"])


# -- what a step may do --------------------------------------------------------------------------------------


class Hits:
    """A metric object that adds up over the ranks."""

    def __init__(self):
        self._forward_cache = None
        self.reset()

    def reset(self):
        self.counts = torch.zeros(2)

    def __call__(self, right):
        here = torch.stack([right.float().sum(), torch.tensor(float(right.numel()))])
        self.counts += here
        self._forward_cache = here[0] / here[1]

    def compute(self):
        counts = self.counts.clone()
        if dist.is_initialized():
            dist.all_reduce(counts)
        self.total = counts[1].item()
        return counts[0] / counts[1]


class Measured(Stack):
    """Counts samples in a metric object and in an attribute, after the forward; its batch holds their names."""

    def __init__(self):
        super().__init__()
        self.hits = Hits()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y, names = self.batch = batch  # what is the same each time is no matter
        self.size, self.twice = len(x), x * 2
        assert [f"{value:.6f}" for value in x[:, 0].tolist()] == names
        try:
            output = self(x)
        except Exception as error:  # nothing that the user's code should meet
            raise AssertionError from error
        self.hits((output > 0) == (y > 0))
        self.log("hits", self.hits, on_step=True, on_epoch=True)
        self.seen += names
        loss = F.mse_loss(output, y)
        return {"loss": loss, "positive": (output > 0).sum(), "names": names}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs = outputs


def named(items):
    x, y = (torch.stack(column) for column in zip(*items, strict=True))
    return x, y, [f"{value:.6f}" for value in x[:, 0].tolist()]


def measured(strategy):
    run = trainer(strategy, max_epochs=1)
    module = Measured()
    run.fit(module, DataLoader(samples(), BATCH, collate_fn=named))
    assert module(samples().tensors[0]).shape == (SAMPLES, 1), "after the run it is an ordinary model again"
    outputs = module.outputs
    if outputs is not None:
        outputs = {"loss": outputs["loss"].item(), "positive": int(outputs["positive"]), "names": outputs["names"]}
    return floats(run.callback_metrics), module.hits.total, module.seen, outputs


class Noisy(Stack):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])


class NoisyValidation(Stack):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0] + torch.randn_like(batch[0])), batch[1]))


class Counting(Stack):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.total += len(batch[0])
        return super().training_step(batch, batch_idx)


class MeasuringInputs(Stack):
    def __init__(self):
        super().__init__()
        self.inputs = Hits()

    def training_step(self, batch, batch_idx):
        self.inputs(batch[0] > 0)
        return super().training_step(batch, batch_idx)


class KeepingBatches(Stack):
    def __init__(self):
        super().__init__()
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)


class CallsItselfInAHook(Stack):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self(batch[0])


class WithAForwardOfItsOwn(Stack):
    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(Stack.forward, self)


class Flattens(Stack):
    """Its forward sees more samples than the batch has."""

    def training_step(self, batch, batch_idx):
        x = torch.cat([batch[0], batch[0]])
        return F.mse_loss(self(x), torch.cat([batch[1], batch[1]]))


def attempt(model, count=SAMPLES, own_collate=False, options=None):
    """What a user reads of a fit that can't work, and how many batches had been trained on."""
    run = trainer("pipeline", **(options or {}))
    loader = DataLoader(samples(count), BATCH, collate_fn=(lambda items: named(items)[:2]) if own_collate else None)
    try:
        run.fit(globals()[model](), loader, DataLoader(samples(16), BATCH))
    except Exception as error:
        return type(error).__name__, str(error), run.fit_loop.total_batches
    return "nothing", "", run.fit_loop.total_batches


def without_a_trainer():
    """(the loss of three steps of a loop by hand, one with the strategy of a pipeline and one in plain PyTorch)."""
    from world import joined

    batches = DataLoader(samples(48), BATCH)
    plain = Stack()
    optimizer = plain.configure_optimizers()
    expected = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses = []
    with joined(HybridStrategy(pipeline=2, microbatches=4)) as strategy:
        module = Stack()
        module.log = lambda *args, **kwargs: None
        strategy.connect(module)
        strategy.setup_model()
        optimizer = module.configure_optimizers()
        strategy.setup_optimizers([optimizer])
        step = strategy.step_function("training_step")
        for index, batch in enumerate(batches):
            optimizer.zero_grad()
            loss = step(batch, index)
            strategy.optimizer_step(optimizer)
            losses.append(None if loss is None else loss.item())
    return losses, expected


class Lengths(Stack):
    """Batches of eleven lengths, one after another, twice."""

    def on_train_end(self):
        pipe = getattr(self.trainer.strategy, "pipe", None)
        self.kept = None if pipe is None else len(pipe._schedules)
        self.final = {
            name: parameter.detach().clone() for name, parameter in self.named_parameters() if not parameter.is_meta
        }


def lengths(strategy):
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(8, length, 4, generator=generator) for length in range(1, 12)]
    run = trainer(strategy, max_epochs=2)
    module = Lengths()
    run.fit(module, [(x, x.sum(2, keepdim=True)) for x in batches])
    return module.kept, module.final


def gathered():
    """Nests of odd tensors, other ones on each rank, by both ways."""
    from world import joined, rank

    with joined(HybridStrategy(pipeline=2)) as strategy:
        mine = {
            "none": torch.zeros(0, 3), "scalar": torch.tensor(rank() + 0.5), "half": torch.ones(3).bfloat16() * rank(),
            "columns": torch.arange(6.0).reshape(2, 3).T + rank(), "flags": torch.tensor([True, False]),
            "nested": [{"step": 3, "count": torch.tensor(2**40 + rank())}], "other": f"of rank {rank()}",
        }  # fmt: skip
        if rank() == 1:
            mine["extra"] = torch.ones(2)
        return on_first_rank(mine, strategy.root_device), on_every_rank(mine, strategy.root_device), mine


def timeouts():
    """Of each axis that is no whole world, and of the world, in seconds."""
    from world import joined

    with joined(HybridStrategy(pipeline=2, data=2, timeout=timedelta(seconds=77))) as strategy:
        groups = [dist.group.WORLD, strategy.mesh.get_group("pipeline"), strategy.mesh.get_group("data")]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return [backend.options._timeout.total_seconds() for backend in backends]
