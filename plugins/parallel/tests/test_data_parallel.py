"""dp and ddp2 against one device on the same global batch: weights, what is logged, evaluation, checkpoints."""

import copy
import csv
import dataclasses
import functools
import os
import socket
import subprocess
import sys
import typing

import models
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from tiers import slow
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchhal import Callback, ModelCheckpoint, Module, Trainer
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.resolve import Request, resolve
from torchhal.trainer.loggers import CSVLogger
from torchhal_parallel._scatter_gather import merge, split_batch
from torchhal_parallel.data_parallel import DataParallelStrategy

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
PLACES = [("cpu", 2), ("cpu", 3), ("sim", 2)]
BATCHES = 24
LAST = 7  # samples of the last batch, which 2 and 3 don't divide


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads decides the order of sums
    yield
    torch.set_num_threads(before)


@pytest.fixture
def place(request):
    """(accelerator, devices)."""
    if request.param[0] == "sim":
        pytest.importorskip("torchhal_simulator")
    return request.param


everywhere = pytest.mark.parametrize("place", PLACES, indirect=True, ids=lambda place: f"{place[0]}-{place[1]}")
two_devices = pytest.mark.parametrize("place", [("cpu", 2), ("sim", 2)], indirect=True, ids=lambda place: place[0])


def dataset(model, batches=BATCHES):
    inputs, targets = models.data(models.Transformer if model is models.Transformer else models.ConvNet, batches)
    kept = (batches - 1) * models.BATCH + LAST
    return TensorDataset(inputs[:kept], targets[:kept])


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(trainer.callback_metrics["loss_step"]))


def make(place, strategy=None, **options):
    accelerator, devices = place
    settings = {
        "accelerator": accelerator, "devices": devices, "strategy": strategy or ("dp" if devices > 1 else "auto"),
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(**{**settings, **options})


def train(place, module, data, batch_size=models.BATCH, **options):
    """(losses of the batches, state) after a fit."""
    losses = Losses()
    trainer = make(place, callbacks=[losses, *options.pop("callbacks", [])], **options)
    trainer.fit(module, DataLoader(data, batch_size))
    return losses.values, module.state_dict()


def plain(module, data, parts=1, dtype=torch.float32):
    """The loop anybody would write; with ``parts``, over the parts of each batch, the first one's buffers kept."""
    module.to(dtype)
    [optimizer], [config] = module.configure_optimizers()
    losses = []
    for index, (x, y) in enumerate(DataLoader(data, models.BATCH)):
        x = x.to(dtype) if x.is_floating_point() else x
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        after = before
        total = 0.0
        for part, (xs, ys) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    buffer.copy_(before[name])
            loss = F.cross_entropy(module(xs).flatten(0, -2), ys.flatten()) * (len(xs) / len(x))
            (loss / models.ACCUMULATE).backward()
            total += loss.item()
            if part == 0:
                after = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(after[name])
        losses.append(total)
        if index % models.ACCUMULATE == models.ACCUMULATE - 1:
            nn.utils.clip_grad_norm_(module.parameters(), models.CLIP)
            optimizer.step()
            config["scheduler"].step()
            optimizer.zero_grad()
    return losses, module.state_dict()


@functools.lru_cache
def reference(model, parts, dtype):
    return plain(model(), dataset(model), parts, dtype)


def greatest(state, other):
    assert state.keys() == other.keys()
    return max((state[name].double() - other[name].double()).abs().max().item() for name in state)


# -- training ------------------------------------------------------------------------------------------------


EXACT = {"32-true": (torch.float32, 3e-5), "64-true": (torch.float64, 1e-11)}
CASES = [(place, precision) for place in PLACES for precision in EXACT if precision == "32-true" or place[0] == "cpu"]


@pytest.mark.parametrize(("place", "precision"), CASES, indirect=["place"], ids=str)
@pytest.mark.parametrize("model", [models.Transformer, models.ConvNet, models.BatchNormNet])
def test_equals_the_plain_loop(place, model, precision):
    dtype, close = EXACT[precision]
    # a batch norm sees a part, so the loop that it is compared with runs over the parts by hand
    parts = place[1] if model is models.BatchNormNet else 1
    losses, state = reference(model, parts, dtype)
    mine, my_state = train(
        place, model(), dataset(model), precision=precision,
        accumulate_grad_batches=models.ACCUMULATE, gradient_clip_val=models.CLIP,
    )  # fmt: skip
    assert len(mine) == BATCHES
    assert mine == pytest.approx(losses, abs=close)
    assert greatest(my_state, state) < close


class Descends(models.ConvNet):
    def configure_optimizers(self):  # float16 has no room for Adam's eps
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


@two_devices
@pytest.mark.parametrize(
    ("precision", "close"), [("bf16-mixed", 2e-2), ("16-mixed", 5e-3), ("bf16-true", 6e-2), ("16-true", 1e-2)]
)
def test_precisions(place, precision, close):
    options = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": models.CLIP}
    data = dataset(models.BatchNormNet)
    alone, _ = train((place[0], 1), Descends(), data, **options)
    mine, state = train(place, Descends(), data, **options)
    assert mine == pytest.approx(alone, abs=close)
    assert mine[0] != mine[-1]
    expected = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)
    assert {value.dtype for value in state.values()} == {expected}


class Odd(Module):
    """Frozen, unused, without dimension, tied, a recurrent layer and a list of layers that no ModuleList knows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.listed = [self.frozen, self.head]
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("same", self.seen)
        self.ties = []

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        self.ties.append(self.head.weight is self.embed.weight)
        x, _ = self.rnn(self.embed(batch[0]))
        for layer in self.listed:
            x = layer(x) * self.scale
        loss = F.cross_entropy(x.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "rows": batch[0][:, 0], "device": str(self.device)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


def odd_data(count=61):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randint(0, 11, (count, 5), generator=generator) for _ in range(2)))


@everywhere
def test_parameters_of_every_kind(place):
    class Outputs(Callback):
        rows = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.rows.append(outputs["rows"].cpu())

    def kept(self, batch, batch_idx):
        output = Odd.training_step(self, batch, batch_idx)
        output.pop("device")  # not the same for both parts
        return output

    module = type("Odd2", (Odd,), {"training_step": kept})()
    alone = copy.deepcopy(module)
    outputs = Outputs()
    outputs.rows = []
    losses, state = train(place, module, odd_data(), 8, callbacks=[outputs], gradient_clip_val=0.3)
    expected, expected_state = train((place[0], 1), alone, odd_data(), 8, gradient_clip_val=0.3)
    assert losses == pytest.approx(expected, abs=1e-5)
    seen = {"seen", "same"}  # the first part's
    for name, value in state.items():
        if name not in seen:
            torch.testing.assert_close(value, expected_state[name], atol=1e-5, rtol=0, msg=name)
    assert state["seen"] == sum(len(rows.tensor_split(place[1])[0]) for rows in outputs.rows)
    assert torch.equal(torch.cat(outputs.rows), odd_data().tensors[0][:, 0])  # in order
    assert all(module.ties)
    assert module.head.weight is module.embed.weight
    assert state["unused.weight"].equal(Odd().unused.weight) and module.unused.weight.grad is None
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())


@pytest.mark.simulator
def test_what_the_parts_return_must_agree():
    pytest.importorskip("torchhal_simulator")
    with pytest.raises(ModelError, match=r"\['device'\] \('sim:0', 'sim:1'\): return tensors"):
        train(("sim", 2), Odd(), odd_data(), 8)


@two_devices
def test_layers_that_learn_their_shapes_from_the_first_batch(place):
    class Lazy(models.Base):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Flatten(), nn.LazyLinear(8, bias=False), nn.LazyBatchNorm1d(), nn.LazyLinear(5)
            )

        def forward(self, images):
            return self.body(images)

    module = Lazy()
    losses, state = train(place, module, dataset(models.ConvNet, 8))
    assert state["body.2.num_batches_tracked"] == 8
    assert len(losses) == 8 and state["body.1.weight"].shape == (8, 64)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("place", PLACES[:2])
def test_sparse_gradients(place):
    class Sparse(Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 4, sparse=True)

        def training_step(self, batch, batch_idx):
            loss = (self.embed(batch[0]).mean(1) - batch[1][:, :4]).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    losses, state = train(place, Sparse(), odd_data(), 8)
    expected, expected_state = train((place[0], 1), Sparse(), odd_data(), 8)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert greatest(state, expected_state) < 1e-5


@two_devices
def test_an_optimizer_with_a_closure(place):
    class Line(Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            loss = (self.layer(batch[0]).tanh() - batch[1]).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=5)

    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(22, 3, generator=generator), torch.rand(22, 1, generator=generator))
    losses, state = train(place, Line(), data, 9, max_epochs=3)
    expected, expected_state = train((place[0], 1), Line(), data, 9, max_epochs=3)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert greatest(state, expected_state) < 1e-4


def test_a_part_without_a_loss_skips_the_batch():
    class Skips(models.ConvNet):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 and len(batch[0]) == 7 else loss  # the second of 8 and 7

    trainer = make(("cpu", 2))
    trainer.fit(Skips(), DataLoader(TensorDataset(*models.data(models.ConvNet, 3)), 15))
    assert trainer.global_step == 3


def test_one_device_is_a_single_device():
    losses, state = train(("cpu", 1), models.ConvNet(), dataset(models.ConvNet), strategy="dp")
    expected, expected_state = train(("cpu", 1), models.ConvNet(), dataset(models.ConvNet), strategy="single_device")
    assert losses == expected and greatest(state, expected_state) == 0


@two_devices
def test_the_parts_are_where_they_should_be(place):
    seen = []

    class Where(models.ConvNet):
        def training_step(self, batch, batch_idx):
            kind = batch[0].device.type
            seen.append((len(batch[0]), batch[0].device, self.device, torch.zeros(1, device=kind).device))
            return super().training_step(batch, batch_idx)

    trainer = make(place, limit_train_batches=1)
    trainer.fit(Where(), DataLoader(dataset(models.ConvNet), 5))
    strategy = trainer.strategy
    assert [size for size, *_ in seen] == [3, 2, 5], "at last for the loss of the whole"
    assert [row[1:] for row in seen[:2]] == [(device,) * 3 for device in strategy.devices]
    assert (strategy.world_size, strategy.num_local_processes(2), strategy.root_device) == (1, 1, strategy.devices[0])
    assert trainer.plan.world_size == 1 and not torch.distributed.is_initialized()


# -- what is logged ------------------------------------------------------------------------------------------


class Accuracy:
    """A metric object, as torchmetrics has them: ``forward`` gives the value of this call."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.count = 0
        self._forward_cache = None

    def __call__(self, logits, labels):
        right = (logits.argmax(-1) == labels).sum().cpu()
        self._forward_cache = right / len(labels)
        self.right += int(right)
        self.count += len(labels)

    def compute(self):
        return torch.tensor(self.right / self.count)


class Talks(models.ConvNet):
    def __init__(self):
        super().__init__()
        self.metric = Accuracy()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        each = F.cross_entropy(logits, y, reduction="none")
        both = {"on_step": True, "on_epoch": True}
        self.log("mean", each.mean(), **both)
        self.log("sum", each.sum(), reduce_fx="sum", **both)
        self.log("least", each.min(), reduce_fx=torch.min, **both)
        self.log("most", each.max(), reduce_fx="max", **both)
        self.log("number", float(each.detach().cpu().mean()), **both)
        self.log("count", len(x), reduce_fx="sum", **both)
        self.log("integer", (logits.argmax(1) == y).sum(), reduce_fx="sum", **both)
        self.log("narrow", each.mean().to(torch.bfloat16), on_step=False, on_epoch=True)
        self.log("first", y[0].float(), reduce_fx="max")
        self.log("rows", each.mean(), batch_size=len(x), **both)
        zeros = y == 0  # perhaps none in a part: a mean of nothing, with no weight
        self.log("weighed", each[zeros].mean(), batch_size=zeros.sum(), **both)
        self.log("host_weight", each[zeros].mean().detach().cpu(), batch_size=int(zeros.sum()), **both)
        for value in (each.mean(), 2 * each.mean()):
            self.log("twice", value, **both)
        self.metric(logits, y)
        self.log("metric", self.metric, **both)
        self.log_dict({"a": each.mean(), "b": each.mean() ** 0}, prog_bar=True)
        return each.mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val", loss)
        self.log("val_both", loss, add_dataloader_idx=False, on_step=True, on_epoch=True)

    def test_step(self, batch, batch_idx):
        self.log("test", F.cross_entropy(self(batch[0]), batch[1]))
        self.log("test_count", len(batch[0]), reduce_fx="sum")


def rows(folder):
    with open(next(folder.rglob("metrics.csv"))) as file:
        return list(csv.DictReader(file))


@everywhere
def test_logs_what_one_device_logs(place, tmp_path):
    def run(place, folder):
        trainer = make(place, logger=CSVLogger(str(folder)), log_every_n_steps=1, max_epochs=2)
        data = dataset(models.ConvNet, 4)
        module = Talks()
        trainer.fit(module, DataLoader(data, 16), [DataLoader(data, 10), DataLoader(data, 20)])
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        bar = trainer.progress_bar_metrics
        return metrics, bar, trainer.test(module, DataLoader(data, 10)), rows(folder)

    mine, bar, test, table = run(place, tmp_path / "mine")
    alone, alone_bar, alone_test, alone_table = run((place[0], 1), tmp_path / "alone")
    assert mine.keys() == alone.keys() >= {"mean_step", "mean_epoch", "sum", "val/dataloader_idx_1", "metric_epoch"}
    inexact = {name: 0.02 for name in mine if name.startswith("narrow")}
    for name, value in alone.items():
        if name == "first":
            continue  # the first of each part
        assert mine[name] == pytest.approx(value, rel=inexact.get(name, 2e-5), nan_ok=True), name
    assert bar == pytest.approx(alone_bar, rel=1e-5)
    assert test[0] == pytest.approx(alone_test[0], rel=1e-5)
    assert len(table) == len(alone_table) > 8
    for row, alone_row in zip(table, alone_table, strict=True):
        for name, text in alone_row.items():
            if name == "first":
                continue
            assert bool(row[name]) == bool(text), name
            if text:
                close = inexact.get(name, 2e-5)
                assert float(row[name]) == pytest.approx(float(text), rel=close, nan_ok=True), name


@pytest.mark.simulator
@pytest.mark.parametrize("fn", ["fit", "validate"])
def test_a_batch_waits_for_no_device(fn):
    """Parts, logs and seeds: many batches wait as often as few, but for those whose losses are compared."""
    simulator = pytest.importorskip("torchhal_simulator")

    class Logs(models.ConvNet):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            for reduction in ("mean", "sum", "min", "max"):
                self.log(f"{reduction}", loss, reduce_fx=reduction, on_epoch=True)
            self.log("weighed", loss, on_epoch=True, batch_size=(batch[1] == 0).sum())
            self.log("integer", batch[1].sum(), on_epoch=True, reduce_fx="sum")
            return loss

        def validation_step(self, batch, batch_idx):
            self.training_step(batch, batch_idx)

    def waits(count):
        options = {"limit_train_batches": count, "limit_val_batches": count, "gradient_clip_val": 1.0}
        trainer = make(("sim", 2), **options)
        batches = [tuple(tensor.to("sim") for tensor in batch) for batch in DataLoader(dataset(models.ConvNet), 15)]
        with simulator.counting() as counted:
            getattr(trainer, fn)(Logs(), batches)
        return counted.synchronizations

    assert waits(9) == waits(15)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": torch.ones(2)}, ValueError, "with one element"),
        ({"value": 1.0, "reduce_fx": "median"}, ConfigurationError, "'reduce_fx' must be one of"),
        ({"value": "much"}, TypeError, "must be a number"),
        ({"value": 1.0, "batch_size": "2"}, TypeError, "'batch_size'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_where_it_is_logged(arguments, error, message):
    class Wrong(models.ConvNet):
        def training_step(self, batch, batch_idx):
            self.log("x", **arguments)
            raise AssertionError("the line above must raise")

    with pytest.raises(error, match=message):
        make(("cpu", 2)).fit(Wrong(), DataLoader(dataset(models.ConvNet), 8))


def test_options_must_be_the_same_in_every_part():
    class Changes(models.ConvNet):
        def training_step(self, batch, batch_idx):
            self.log("x", 1.0, prog_bar=len(batch[0]) == 3)

    with pytest.raises(ConfigurationError, match="prog_bar=True, then prog_bar=False"):
        make(("cpu", 2)).fit(Changes(), DataLoader(dataset(models.ConvNet), 5))


def test_the_results_are_back_after_an_error():
    class Fails(models.ConvNet):
        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    trainer = make(("cpu", 2))
    results = trainer.results
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(Fails(), DataLoader(dataset(models.ConvNet), 5))
    assert trainer.results is results


# -- evaluation ----------------------------------------------------------------------------------------------


class Answer(typing.NamedTuple):
    logits: torch.Tensor
    names: list


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    kind: str = "image"


class Answers(models.ConvNet):
    def predict_step(self, batch, batch_idx):
        logits = self(batch["item"].x)
        return {
            "answer": Answer(logits, [f"{name}!" for name in batch["name"]]),
            "pair": (logits.argmax(1), logits.mean()),
            "most": [logits.max(1).values],
            "right": (logits.argmax(1) == batch["y"]).sum(),
            "index": batch_idx,
            "kind": batch["item"].kind,
            "nothing": None,
            "item": dataclasses.replace(batch["item"], x=logits * 2),
            "mean": float(logits.detach().cpu().double().mean()),
        }


def collate(samples):
    x, y = zip(*samples, strict=True)
    return {"item": Item(torch.stack(x)), "y": torch.stack(y), "name": [f"n{int(label)}" for label in y], "scale": 2}


@pytest.mark.simulator
def test_predictions_come_merged_and_in_order():
    for place in PLACES:
        if place[0] == "sim":
            pytest.importorskip("torchhal_simulator")
        data = dataset(models.ConvNet, 2)
        given = make(place).predict(Answers(), DataLoader(data, 9, collate_fn=collate))
        alone = make((place[0], 1)).predict(Answers(), DataLoader(data, 9, collate_fn=collate))
        assert len(given) == len(alone) == 3
        for mine, expected in zip(given, alone, strict=True):
            assert list(mine) == list(expected)
            assert isinstance(mine["answer"], Answer) and isinstance(mine["item"], Item)
            assert mine["answer"].names == expected["answer"].names
            assert mine["answer"].logits.device == CPU
            torch.testing.assert_close(mine["answer"].logits, expected["answer"].logits)
            torch.testing.assert_close(mine["pair"], expected["pair"])
            torch.testing.assert_close(mine["most"], expected["most"])
            torch.testing.assert_close(mine["item"].x, expected["item"].x)
            assert mine["mean"] == pytest.approx(expected["mean"], rel=1e-5)
            for key in ("right", "index", "kind", "nothing"):
                assert mine[key] == expected[key]


# -- checkpoints ---------------------------------------------------------------------------------------------


@two_devices
@pytest.mark.parametrize("first", ["dp", "single"])
def test_another_strategy_continues(place, first, tmp_path):
    """Saved in the midst of an epoch and of an accumulation, continued under the other one."""
    one, other = (place, (place[0], 1)) if first == "dp" else ((place[0], 1), place)
    data = dataset(models.Transformer, 12)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": models.CLIP, "max_epochs": 2}

    class SaveAt(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == 0 and batch_idx == 6:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def run(place, ckpt_path=None, callbacks=()):
        module = models.Transformer()
        losses = Losses()
        trainer = make(place, callbacks=[losses, *callbacks], **options)
        trainer.fit(
            module,
            DataLoader(data, models.BATCH, shuffle=True, generator=torch.Generator().manual_seed(4)),
            ckpt_path=ckpt_path,
        )
        return losses.values, module.state_dict(), float(trainer.callback_metrics["loss_epoch"])

    losses, state, epoch = run(one, callbacks=[SaveAt()])
    checkpoint = torch.load(tmp_path / "middle.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == models.Transformer().state_dict().keys()
    continued, continued_state, continued_epoch = run(other, ckpt_path=tmp_path / "middle.ckpt")
    assert continued == pytest.approx(losses[7:], abs=1e-4)
    assert continued_epoch == pytest.approx(epoch, abs=1e-4)
    assert greatest(continued_state, state) < 1e-4


@two_devices
def test_a_resumed_run_is_the_same_run(place, tmp_path):
    class Drops(models.ConvNet):
        def forward(self, images):
            return super().forward(F.dropout(images, 0.3, self.training))

    def run(epochs, ckpt_path=None):
        torch.manual_seed(1)
        module = Drops()
        saver = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{epoch}")
        trainer = make(place, callbacks=[saver], enable_checkpointing=True, max_epochs=epochs)
        trainer.fit(module, DataLoader(dataset(models.ConvNet, 4), 16, shuffle=True), ckpt_path=ckpt_path)
        return module.state_dict(), saver.last_model_path or saver.best_model_path

    whole, _ = run(3)
    first = next(path for path in sorted(tmp_path.iterdir()) if "epoch=0" in path.name)
    torch.manual_seed(99)
    continued, _ = run(3, ckpt_path=first)
    assert greatest(continued, whole) == 0


@two_devices
def test_dropout_of_the_parts_differs_and_from_batch_to_batch(place):
    masks = []

    class Drops(models.ConvNet):
        def forward(self, images):
            masks.append(tuple(F.dropout(torch.ones(64, device=images.device)).tolist()))
            return super().forward(images)

    make(place, limit_train_batches=4).fit(Drops(), DataLoader(dataset(models.ConvNet), 8))
    assert len(masks) == len(set(masks)) == 8


# -- splitting and merging -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "parts", "sizes"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1]), (1, 2, [1]), (8, 2, [4, 4])])
def test_sizes_of_parts(size, parts, sizes):
    batch = torch.arange(size)
    split = split_batch(batch, parts)
    assert [n for _, n in split] == sizes
    assert torch.equal(torch.cat([part for part, _ in split]), batch)


def test_structures_are_split():
    batch = {
        "pair": (torch.arange(5), torch.arange(10).view(5, 2)),
        "answer": Answer(torch.ones(5, 1), list("abcde")),
        "item": Item(torch.arange(5), "cat"),
        "scalar": torch.tensor(3),
        "text": "hello",
        "none": None,
        "number": 5,
        "few": ["x", "y"],
    }
    (first, m), (second, n) = split_batch(batch, 2)
    assert (m, n) == (3, 2)
    assert first["pair"][0].tolist() == [0, 1, 2] and second["pair"][1].shape == (2, 2)
    assert first["answer"].names == ["a", "b", "c"] and type(second["answer"]) is Answer
    assert second["item"].x.tolist() == [3, 4] and second["item"].kind == "cat"
    for part in (first, second):
        assert [part[key] for key in ("scalar", "text", "none", "number", "few")] == [3, "hello", None, 5, ["x", "y"]]
    assert batch["item"].x.shape == (5,)  # the batch is as it was


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("text", "a batch of type str holds no tensor"),
        ([1, 2, 3], "a batch of type list holds no tensor"),
        ({"x": torch.tensor(1.0)}, "a batch of type dict holds no tensor"),
        ((torch.ones(4), torch.ones(3)), r"got the shapes \(4,\), \(3,\)"),
        ([nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])], "got the shapes"),
    ],
    ids=["str", "list", "scalar", "sizes", "packed"],
)
def test_a_batch_that_cannot_be_split(batch, message):
    with pytest.raises(ModelError, match=message):
        split_batch(batch, 2)


def test_an_object_that_cannot_be_split():
    class Graph:
        def to(self, device, **options):
            return self

    with pytest.raises(ModelError, match="a Graph in the batch can't be divided"):
        split_batch({"x": torch.ones(4), "graph": Graph()}, 2)


class Bag:
    """A batch of a type that only its owner can divide."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.batch_size = len(x)

    def to(self, device, **options):
        return Bag(self.x.to(device), self.y.to(device))


class Bags(Dataset):
    def __getitem__(self, index):
        return dataset(models.ConvNet)[index]

    def __len__(self):
        return 20


class BagNet(models.ConvNet):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch.x, batch.y), batch_idx)


def bag(samples):
    return Bag(*(torch.stack(column) for column in zip(*samples, strict=True)))


def split_bag(batch, parts):
    return [Bag(x, y) for x, y in zip(batch.x.tensor_split(parts), batch.y.tensor_split(parts), strict=True)]


@two_devices
def test_a_split_of_ones_own(place):
    results = []
    for at, strategy in ((place, DataParallelStrategy(split=split_bag)), ((place[0], 1), "auto")):
        module = BagNet()
        trainer = make(at, strategy)
        trainer.fit(module, DataLoader(Bags(), 9, collate_fn=bag))
        results.append((module.state_dict(), float(trainer.callback_metrics["loss_epoch"])))
    assert greatest(results[0][0], results[1][0]) < 1e-5
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


@pytest.mark.parametrize(
    ("split", "message"),
    [(lambda batch, parts: [], "got 0 batches"), (lambda batch, parts: ["a", "b"], r"sizes \[None, None\]")],
    ids=["none", "unknown"],
)
def test_a_wrong_split(split, message):
    with pytest.raises(ModelError, match=message):
        trainer = make(("cpu", 2), DataParallelStrategy(split=split))
        trainer.fit(BagNet(), DataLoader(Bags(), 9, collate_fn=bag))


@pytest.mark.parametrize(
    "values",
    [("a", "b"), (1, 2), ({"a": 1}, {"b": 1}), (torch.ones(1), None), ((1, 2), (1,)), (np.ones(2), np.ones(2))],
    ids=str,
)
def test_unlike_outputs(values):
    with pytest.raises(ModelError, match="the parts of a batch gave different things"):
        merge(values, [2, 1], CPU)


# -- refusals ------------------------------------------------------------------------------------------------


def test_manual_optimization_is_refused_before_training():
    class Manual(models.ConvNet):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            raise AssertionError("it must not come to this")

    with pytest.raises(ConfigurationError, match="'dp' runs a step once for each of its 2 devices, and Manual"):
        make(("cpu", 2)).fit(Manual(), DataLoader(dataset(models.ConvNet), 8))


def test_several_nodes_are_refused():
    with pytest.raises(UnsupportedCombinationError, match=r"num_nodes=2.*'ddp2'"):
        make(("cpu", 2), num_nodes=2)


def test_a_wrong_argument():
    with pytest.raises(ConfigurationError, match="'split' must be a function"):
        DataParallelStrategy(split=3)


def test_a_loss_that_is_none_is_named():
    class Wrong(models.ConvNet):
        def training_step(self, batch, batch_idx):
            return {"losses": torch.ones(())}

    with pytest.raises(ModelError, match="a dict with 'loss'"):
        make(("cpu", 2)).fit(Wrong(), DataLoader(dataset(models.ConvNet), 8))


@pytest.mark.simulator
@pytest.mark.parametrize("kind", ["attribute", "checkpointing"])
def test_tensors_on_the_wrong_device_are_explained(kind):
    pytest.importorskip("torchhal_simulator")

    class Wrong(models.ConvNet):
        def forward(self, images):
            if kind == "checkpointing":
                return torch.utils.checkpoint.checkpoint(self.body, images, use_reentrant=False) * self.scale
            if not hasattr(self, "shift"):
                self.__dict__["shift"] = torch.ones(1, device=images.device)
            return super().forward(images + self.shift)

    with pytest.raises(ModelError, match="runs on each of sim:0, sim:1: make the tensors that a model keeps"):
        make(("sim", 2)).fit(Wrong(), DataLoader(dataset(models.ConvNet), 8))


def test_activation_checkpointing_on_one_device():
    class Again(models.ConvNet):
        def forward(self, images):
            return torch.utils.checkpoint.checkpoint(self.body, images, use_reentrant=False) * self.scale

    losses, state = train(("cpu", 2), Again(), dataset(models.ConvNet))
    expected, expected_state = train(("cpu", 1), models.ConvNet(), dataset(models.ConvNet))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert greatest(state, expected_state) < 1e-5


def test_a_setup_that_does_not_call_the_inherited_one_keeps_the_logs():
    class Mine(DataParallelStrategy):
        def setup(self, trainer):
            self.setup_model(training=True)

    trainer = make(("cpu", 2), Mine())
    trainer.fit(Talks(), DataLoader(dataset(models.ConvNet, 2), 16))
    assert float(trainer.callback_metrics["count_epoch"]) == models.BATCH + LAST
    assert float(trainer.callback_metrics["count_step"]) == LAST


def test_a_dict_from_one_part_alone_is_refused():
    class Wrong(models.ConvNet):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss} if len(batch[0]) == 2 else loss

    with pytest.raises(ModelError, match="the parts of a batch gave different things"):
        make(("cpu", 2)).fit(Wrong(), DataLoader(dataset(models.ConvNet), 5))


# -- ddp2 ----------------------------------------------------------------------------------------------------


def as_node():
    """This rank of the world as the only process of its node."""
    os.environ.update(GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


def as_rank():
    os.environ.update(GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])


def on_a_node(accelerator, devices, model, folder=None, ckpt_path=None, options=None):
    as_node()
    try:
        module = model()
        losses = Losses()
        saver = [ModelCheckpoint(dirpath=folder, filename="{step}")] if folder else []
        trainer = make(
            (accelerator, devices), "ddp2", num_nodes=2, callbacks=[losses, *saver], enable_checkpointing=bool(folder),
            **{"accumulate_grad_batches": models.ACCUMULATE, "gradient_clip_val": models.CLIP, **(options or {})},
        )  # fmt: skip
        data = TensorDataset(*models.data(model))
        trainer.fit(
            module,
            DataLoader(data, models.BATCH // 2),
            DataLoader(dataset(model, 3), models.BATCH),
            ckpt_path=ckpt_path,
        )
        strategy = trainer.strategy
        shape = (trainer.world_size, trainer.global_rank, trainer.node_rank, trainer.local_rank, len(strategy.devices))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = torch.cat(trainer.predict(module, DataLoader(dataset(model, 3), models.BATCH)))
        return losses.values, module.state_dict(), metrics, shape, predicted
    finally:
        as_rank()


@functools.lru_cache
def alone(model):
    module = model()
    losses = Losses()
    trainer = make(
        ("cpu", 1), callbacks=[losses], accumulate_grad_batches=models.ACCUMULATE, gradient_clip_val=models.CLIP
    )
    trainer.fit(
        module,
        DataLoader(TensorDataset(*models.data(model)), models.BATCH),
        DataLoader(dataset(model, 3), models.BATCH),
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return losses.values, module.state_dict(), metrics


@pytest.mark.parametrize(("accelerator", "devices"), [("cpu", 2), slow("cpu", 3), slow("sim", 2)])
@pytest.mark.parametrize("model", [slow("Transformer"), "ConvNet"])
def test_two_nodes_equal_one_device(world2, accelerator, devices, model):
    if accelerator == "sim":
        pytest.importorskip("torchhal_simulator")
    losses, state, metrics = alone(getattr(models, model))
    nodes = world2.run(on_a_node, accelerator, devices, getattr(models, model), timeout=90)
    for rank, (_, their_state, their_metrics, shape, _) in enumerate(nodes):
        assert shape == (2, rank, rank, 0, devices)
        assert greatest(their_state, state) < 3e-5
        assert their_metrics["loss_epoch"] == pytest.approx(metrics["loss_epoch"], rel=1e-5)
        assert their_metrics["val_loss"] == pytest.approx(metrics["val_loss"], rel=1e-5)
    mean = [sum(pair) / 2 for pair in zip(nodes[0][0], nodes[1][0], strict=True)]
    assert mean == pytest.approx(losses, abs=3e-5)
    assert len(nodes[0][4]) == len(dataset(models.ConvNet, 3))
    assert greatest(nodes[0][1], nodes[1][1]) == 0


def test_a_checkpoint_of_two_nodes_continues_on_two_and_on_one_device(world2, tmp_path):
    world2.run(on_a_node, "cpu", 2, models.ConvNet, str(tmp_path), None, {"max_steps": 6}, timeout=60)
    [path] = tmp_path.glob("*.ckpt")
    undisturbed = world2.run(on_a_node, "cpu", 2, models.ConvNet, timeout=60)
    resumed = world2.run(on_a_node, "cpu", 2, models.ConvNet, None, str(path), timeout=60)
    for (losses, state, *_), (their_losses, their_state, *_) in zip(undisturbed, resumed, strict=True):
        assert their_losses == losses[6 * models.ACCUMULATE :]
        assert greatest(their_state, state) == 0
    module = models.ConvNet()
    trainer = make(("cpu", 2), accumulate_grad_batches=models.ACCUMULATE, gradient_clip_val=models.CLIP)
    trainer.fit(module, DataLoader(TensorDataset(*models.data(models.ConvNet)), models.BATCH), ckpt_path=path)
    assert trainer.global_step == models.BATCHES // models.ACCUMULATE
    assert greatest(module.state_dict(), alone(models.ConvNet)[1]) < 3e-5


NODE = """
import sys
import torch
import torchhal
from torch.utils.data import DataLoader, TensorDataset


class Line(torchhal.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


x = torch.linspace(-1, 1, 64).view(32, 2)
strategy, num_nodes, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
trainer = torchhal.Trainer(
    accelerator="cpu", strategy=strategy, devices=2, num_nodes=num_nodes, max_epochs=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
line = Line()
trainer.fit(line, DataLoader(TensorDataset(x, 3 * x[:, :1] + 1), batch_size))
weights = [round(value, 5) for value in torch.cat([p.flatten() for p in line.parameters()]).tolist()]
print(trainer.world_size, trainer.global_rank, weights, round(float(trainer.callback_metrics["loss_epoch"]), 5))
"""


def test_nodes_that_are_started_by_hand(tmp_path):
    """The same script on two hosts, with NODE_RANK, MASTER_ADDR and MASTER_PORT; dp gives what they must give."""
    script = tmp_path / "node.py"
    script.write_text(NODE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def start(*arguments, **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.Popen(
            [sys.executable, str(script), *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )

    by_hand = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [start("ddp2", "2", "4", NODE_RANK=str(rank), **by_hand) for rank in range(2)]
    said = [node.communicate(timeout=90)[0].strip() for node in nodes]
    alone = start("dp", "1", "8").communicate(timeout=60)[0].strip()
    assert alone.startswith("1 0 [")
    assert said == [f"2 {rank}{alone.removeprefix('1 0')}" for rank in range(2)]


def test_dp_is_refused_in_one_of_several_processes(monkeypatch):
    variables = {
        "TORCHHAL_LAUNCH_ID": "x", "RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedCombinationError, match="each of which would train by itself"):
        make(("cpu", 2))


# -- without a Trainer -------------------------------------------------------------------------------------------


class Sizes(nn.Module):
    """Notes how many samples, and where, each of its forwards has got."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen = []

    def forward(self, x, scale=1.0, *, shift=None):
        self.seen.append((len(x), str(x.device)))
        output = self.layers(x) * scale
        return output if shift is None else output + shift

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0], 2.0, shift=batch[0][:, :2]), batch[1])


def loop_by_hand(place, name, how):
    """(weights, what the forwards have got) of the loop in the README, by ``strategy.model`` or by a step."""
    strategy = resolve(Request(accelerator=place[0], strategy=name, devices=place[1])).build()

    def run():
        strategy.setup_environment()
        try:
            model = Sizes()
            strategy.connect(model)
            strategy.setup_model()
            optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.1)
            strategy.setup_optimizers([optimizer])

            def by_model(batch, index):
                return F.cross_entropy(strategy.model(batch[0], 2.0, shift=batch[0][:, :2]), batch[1])

            step = strategy.with_precision(by_model) if how == "model" else strategy.step_function("training_step")
            for index, batch in enumerate(by_hand_data()):
                optimizer.zero_grad()
                strategy.backward(step(strategy.batch_to_device(batch), index))
                strategy.optimizer_step(optimizer)
            return {name: tensor.cpu().clone() for name, tensor in strategy.module_state_dict().items()}, model.seen
        finally:
            strategy.teardown()

    return strategy.make_launcher().launch(run)


def by_hand_data():
    x = torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(1))
    return [(part, (part.sum(1) > 0).long()) for part in x]


@two_devices
@pytest.mark.parametrize("how", ["model", "step"])
@pytest.mark.parametrize("name", ["dp", "ddp2"])
def test_a_loop_by_hand_computes_on_every_device(place, name, how):
    model = Sizes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in by_hand_data():
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    state, seen = loop_by_hand(place, name, how)
    devices = ["cpu", "cpu"] if place[0] == "cpu" else ["sim:0", "sim:1"]
    assert seen == list(zip([4, 3] * 6, devices * 6, strict=True))
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


def test_a_split_of_batches_does_not_divide_arguments():
    strategy = resolve(
        Request(accelerator="cpu", devices=2, strategy=DataParallelStrategy(split=split_in_rows))
    ).build()
    strategy.setup_environment()
    try:
        strategy.connect(Sizes())
        strategy.setup_model(training=False)
        with pytest.raises(ConfigurationError, match=r"'split' .* divides batches.*step_function"):
            strategy.model(torch.zeros(4, 4))
    finally:
        strategy.teardown()


def split_in_rows(batch, parts):
    return [batch[start::parts] for start in range(parts)]
