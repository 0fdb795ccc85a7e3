"""What a step logs for the parts of a batch is logged once, as one device logs it."""

import csv

import models
import pytest
import torch
import torch.utils.checkpoint
from batch_parts import LAST, dataset, everywhere, make
from torch.nn import functional as F
from torch.utils.data import DataLoader

from torchhal.errors import ConfigurationError
from torchhal.trainer.loggers import CSVLogger
from torchhal_parallel.data_parallel import DataParallelStrategy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


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


def test_overridden_setup_keeps_the_logs():
    """A setup that does not call the inherited one keeps the logs."""

    class Mine(DataParallelStrategy):
        def setup(self, trainer):
            self.setup_model(training=True)

    trainer = make(("cpu", 2), Mine())
    trainer.fit(Talks(), DataLoader(dataset(models.ConvNet, 2), 16))
    assert float(trainer.callback_metrics["count_epoch"]) == models.BATCH + LAST
    assert float(trainer.callback_metrics["count_step"]) == LAST
