"""One XLA device: the numbers of the plain loop, one graph per step, and nothing read in between."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from xla_training import Counts, CountSteps, Net, assert_close, assert_equal, batches, plain, trainer

from torchhal import Module, seed_everything
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.resolve import Request, resolve
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal_xla import _sdk as sdk

if why := sdk.problem():
    pytest.skip(why, allow_module_level=True)  # said once, not for each test

pytestmark = pytest.mark.usefixtures("torch_xla")


# -- the plain loop's numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulate", "clip", "algorithm", "optimizer"),
    [(1, None, "norm", "adamw"), (3, 0.1, "norm", "sgd"), (2, 0.01, "value", "adamw")],
)
def test_ten_steps_equal_the_plain_loop(accumulate, clip, algorithm, optimizer):
    data = batches(10 * accumulate)
    reference = Net(optimizer=optimizer, schedule=True, norm=True)
    plain(reference, data, accumulate=accumulate, clip=clip, algorithm=algorithm)
    model = Net(optimizer=optimizer, schedule=True, norm=True)
    run = trainer(accumulate_grad_batches=accumulate, gradient_clip_val=clip, gradient_clip_algorithm=algorithm)
    run.fit(model, data)
    assert run.global_step == 10
    assert_close(model, reference)


def test_losses_and_evaluation_equal_the_cpus():
    results = []
    for accelerator, strategy in (("xla", "auto"), ("cpu", "auto")):
        model = Net()
        run = trainer(strategy, accelerator=accelerator)
        run.fit(model, batches(), batches(3))
        logged = {name: float(value) for name, value in run.callback_metrics.items()}
        logged.update({f"again_{k}": v for k, v in run.validate(model, batches(3), verbose=False)[0].items()})
        results.append((logged, run.predict(model, batches(3))))
    (found, outputs), (expected, expected_outputs) = results
    assert found == pytest.approx(expected, abs=1e-5) and {"loss_epoch", "val", "again_val"} <= found.keys()
    for output, wanted in zip(outputs, expected_outputs, strict=True):
        assert output.device.type == "cpu"
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_an_optimizer_that_evaluates_a_closure():
    model, reference = Net(optimizer="lbfgs"), Net(optimizer="lbfgs")
    trainer().fit(model, batches(2))
    optimizer = reference.configure_optimizers()
    for batch in batches(2):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_close(model, reference, 1e-4)


class TwoOptimizers(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[part].parameters(), lr=0.3) for part in (0, 3)]


def test_a_model_that_optimizes_by_hand():
    model, reference = TwoOptimizers(), TwoOptimizers()
    trainer().fit(model, batches())
    optimizers = reference.configure_optimizers()
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
            reference.loss(batch).backward()
            optimizer.step()
    assert_close(model, reference)


def test_a_loop_of_ones_own():
    model, reference = Net(optimizer="sgd"), Net(optimizer="sgd")
    strategy = resolve(Request(accelerator="xla")).build()
    strategy.setup_environment()
    try:
        strategy.connect(model)
        strategy.setup_model()
        optimizer = model.configure_optimizers()
        strategy.setup_optimizers([optimizer])
        step = strategy.with_precision(model.loss)
        for batch in batches():
            optimizer.zero_grad()
            strategy.backward(step(strategy.batch_to_device(batch)))
            strategy.optimizer_step(optimizer)
        assert strategy.reduce(torch.tensor(2.0)).device.type == "xla"
    finally:
        strategy.teardown()
    plain(reference, batches())
    assert_close(model, reference)


def test_running_variances_are_biased():
    """torch_xla's: torch divides by n - 1, not n. Should this fail, it has changed, and the README is wrong."""
    x = torch.randn(8, 3)
    norm = nn.BatchNorm1d(3, momentum=1.0).to("xla")
    norm(x.to("xla"))
    torch.testing.assert_close(norm.running_var.cpu(), x.var(0, unbiased=False))


# -- graphs --------------------------------------------------------------------------------------------------

ONE_GRAPH = {"compiled": 0, "run": 1, "read": 0, "items": 0, "fallbacks": 0}


@pytest.mark.parametrize("strategy", ["single_xla", "xla"])
def test_one_graph_per_step_and_nothing_read(strategy):
    """Logging, clipping and a schedule that changes the rate at every step included."""
    counting = CountSteps()
    run = trainer(strategy, callbacks=[counting], gradient_clip_val=0.1)
    run.fit(Net(schedule=True, dropout=0.5, norm=True), batches(12))
    assert counting.steps[3:] == [ONE_GRAPH] * 9
    assert all(step["read"] == step["items"] == 0 for step in counting.steps)


def test_each_batch_of_an_accumulation_is_one_graph():
    counting = CountSteps()
    trainer(callbacks=[counting], accumulate_grad_batches=3).fit(Net(), batches(18))
    assert counting.steps[9:] == [ONE_GRAPH] * 9


def test_a_logger_reads_at_its_interval_only(tmp_path):
    counting = CountSteps()
    run = trainer(callbacks=[counting], logger=True, default_root_dir=str(tmp_path), log_every_n_steps=4)
    run.fit(Net(), batches(16))
    for index, step in enumerate(counting.steps[4:], start=5):
        assert step == {**ONE_GRAPH, "read": int(index % 4 == 0), "items": int(index % 4 == 0)}, index


def test_evaluation_is_one_graph_per_batch():
    model, data = Net(), batches(8)
    run = trainer()
    run.validate(model, data, verbose=False)
    few, counts = len(data), Counts()
    run.validate(model, data, verbose=False)
    once = counts.since()
    counts = Counts()
    run.validate(model, data * 2, verbose=False)
    twice = counts.since()
    assert (twice["run"] - once["run"], twice["read"], twice["items"]) == (few, once["read"], once["items"])


class CountEpochs:
    """A callback's hooks: the counts of each epoch, its evaluation included."""

    def __init__(self):
        self.epochs = []

    def on_train_start(self, trainer, module):
        self.counts = Counts()

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(self.counts.since())
        self.counts = Counts()


def test_nothing_compiles_after_the_second_epoch(tmp_path):
    """Accumulation, clipping, a schedule, a logger, checkpoints, evaluation and smaller last batches, all together."""
    counting = CountEpochs()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "log_every_n_steps": 3}
    run = trainer(callbacks=[counting], max_epochs=4, logger=True, enable_checkpointing=True,
                  default_root_dir=str(tmp_path), **options)  # fmt: skip
    samples = [(x[0], y[0]) for x, y in batches(44, 1)]  # five batches of 8 and one of 4; three steps
    run.fit(Net(schedule=True, dropout=0.1, norm=True), DataLoader(samples, 8, shuffle=True), DataLoader(samples, 8))
    third, fourth = counting.epochs[2:]
    assert third == fourth and third["compiled"] == third["fallbacks"] == 0, counting.epochs


# -- precision -----------------------------------------------------------------------------------------------


class Dtypes(Net):
    def training_step(self, batch, batch_idx):
        self.seen = (self.net(batch[0]).dtype, self.net[0].weight.dtype)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("precision", "computes", "holds"),
    [
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("16-mixed", torch.float16, torch.float32),
        ("64-true", torch.float64, torch.float64),
    ],
)
def test_precisions_compute_in_their_dtype_and_learn_the_same(precision, computes, holds):
    losses = {}
    for asked in (precision, "32-true"):
        model = Dtypes(optimizer="sgd")
        run = trainer(precision=asked, max_epochs=3)
        run.fit(model, batches())
        losses[asked] = float(run.callback_metrics["loss_epoch"])
        if asked == precision:
            assert model.seen == (computes, holds)
    assert losses[precision] == pytest.approx(losses["32-true"], abs=2e-2)


def test_bf16_costs_no_graph_more():
    counting = CountSteps()
    trainer(callbacks=[counting], precision="bf16-mixed").fit(Net(), batches(8))
    assert counting.steps[3:] == [ONE_GRAPH] * 5


def test_16_mixed_skips_a_step_that_overflows_and_reads_once():
    class Overflows(Net):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (1e30 if batch_idx == 4 else 1.0)

        def on_before_optimizer_step(self, optimizer):
            self.kept = [p.detach().cpu().clone() for p in self.parameters()] if self.trainer.global_step == 4 else None

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 4:
                for kept, now in zip(self.kept, self.parameters(), strict=True):
                    assert torch.equal(kept, now.detach().cpu())

    counting = CountSteps()
    run = trainer(callbacks=[counting], precision="16-mixed")
    model = Overflows(optimizer="sgd")
    run.fit(model, batches(10))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    # the gradients, then the update; torch's scaler asks once whether they are finite
    assert counting.steps[-1] == {"compiled": 0, "run": 2, "read": 1, "items": 1, "fallbacks": 0}


# -- random numbers, resuming --------------------------------------------------------------------------------


def test_the_device_follows_the_seed():
    def masks(seed):
        if seed is not None:
            seed_everything(seed)
        run, model = trainer(), nn.Dropout(0.5)
        model.training_step = lambda batch, index: None
        model.predict_step = lambda batch, index: nn.functional.dropout(batch, 0.5, training=True)
        return torch.stack(run.predict(model, [torch.ones(64)] * 2))

    first, again, other, going_on = masks(1), masks(1), masks(2), masks(None)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, other)
    torch.rand(1)
    assert not torch.equal(other, masks(None)) and going_on.shape == first.shape


def test_generator_states_come_back(torch_xla):
    from torchhal_xla.accelerator import XLAAccelerator

    device, accelerator = torch.device("xla"), XLAAccelerator()
    accelerator.manual_seed(2**64 - 5)  # states use all 64 bits
    state = accelerator.get_rng_state(device)
    assert state.dtype is torch.uint8 and state.shape == (8,) and state.device.type == "cpu"
    first = torch.rand(3, device=device).cpu()
    accelerator.set_rng_state(state, device)
    assert torch.equal(torch.rand(3, device=device).cpu(), first)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_resumed_run_is_equal_to_the_bit(tmp_path, accumulate):
    """From the midst of an epoch, an accumulation and a dropout's stream of random numbers."""

    class Saves(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.fit_loop.total_batches == 6 and self.path:
                self.trainer.save_checkpoint(self.path)

    def make():
        model = Saves(dropout=0.5, schedule=True, norm=True)
        model.path = ""
        return model

    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "max_epochs": 2}
    straight = make()
    straight.path = str(tmp_path / "six.ckpt")
    seed_everything(3)
    trainer(**options).fit(straight, DataLoader(batches(12), batch_size=None, shuffle=True))
    resumed = make()
    seed_everything(99)
    loader = DataLoader(batches(12), batch_size=None, shuffle=True)
    trainer(**options).fit(resumed, loader, ckpt_path=straight.path)
    assert_equal(resumed, straight)


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_a_checkpoint_moves_to_the_cpu_and_back(tmp_path):
    """Four steps here and four there are the eight of the plain loop."""
    data = batches(8)
    reference = Net()
    plain(reference, data)
    for first, second in (("xla", "cpu"), ("cpu", "xla")):
        path = str(tmp_path / f"{first}.ckpt")
        start = trainer("auto", accelerator=first, max_steps=4)
        start.fit(Net(), data)
        start.save_checkpoint(path)
        loaded = torch.load(path, weights_only=True)
        assert {t.device.type for t in loaded["state_dict"].values()} == {"cpu"}
        assert len(loaded["optimizer_states"][0]["state"]) == 4
        model = Net()
        trainer("auto", accelerator=second, max_steps=8).fit(model, data, ckpt_path=path)
        assert_close(model, reference)


@pytest.mark.parametrize("io", ["torch", "dcp", "async"])
def test_any_io_gets_host_copies(tmp_path, io):
    """Left to itself torch's distributed checkpoint writes no values of XLA's tensors, without an error."""
    if io != "torch":
        pytest.importorskip("torchhal_parallel")
    model, path = Net(), str(tmp_path / "checkpoint")
    run = trainer(plugins=[io], max_epochs=2)
    model.on_train_end = lambda: run.save_checkpoint(path)
    run.fit(model, batches())
    again = Net(seed=7)
    trainer(plugins=[io]).validate(again, batches(1), ckpt_path=path, verbose=False)
    assert_equal(again, model)


def test_host_copies_are_made_once_and_keep_the_rest():
    from torchhal_xla.checkpoint import to_host

    tensor = torch.arange(3.0).to("xla") + 1
    host, text = torch.ones(1), ["a"]
    copied = to_host({"a": tensor, "b": [tensor, host], "text": text})
    assert copied["a"] is copied["b"][0] and copied["a"].tolist() == [1.0, 2.0, 3.0]
    assert copied["b"][1] is host and copied["text"] is text
    assert to_host({"b": host})["b"] is host


def test_the_io_by_itself(tmp_path):
    from torchhal_xla.checkpoint import XLACheckpointIO

    path = tmp_path / "tensors.ckpt"
    XLACheckpointIO().save_checkpoint({"t": torch.arange(4).to("xla") * 2}, path)
    assert XLACheckpointIO().load_checkpoint(path)["t"].tolist() == [0, 2, 4, 6]


# -- the module before, during and after ---------------------------------------------------------------------


class Tied(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def training_step(self, batch, batch_idx):
        assert self.head.weight is self.embed.weight and self.head.weight.device.type == "xla"
        return nn.functional.cross_entropy(self.head(self.embed(batch)), batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_parameters_stay_the_objects_they_are():
    model = Tied()
    weight = model.head.weight
    run = trainer(max_epochs=2)
    before = weight.detach().clone()
    run.fit(model, [torch.arange(10)] * 4)
    assert model.head.weight is model.embed.weight is weight and weight.device.type == "cpu"
    assert not torch.equal(weight, before) and torch.equal(model.frozen, torch.ones(3))


def test_nothing_stays_on_the_device_and_another_run_may_follow():
    model = Net()
    run = trainer()
    run.fit(model, batches(2))
    for state in run.strategy.optimizers[0].state.values():
        assert all(value.device.type == "cpu" for value in state.values() if isinstance(value, torch.Tensor))
    trainer("auto", accelerator="cpu").fit(model, batches(2))
    trainer().fit(model, batches(2))


def test_an_error_in_a_step_ends_the_run_and_the_next_one_works():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("no such luck")
            return super().training_step(batch, batch_idx)

    model = Fails()
    with pytest.raises(RuntimeError, match="no such luck"):
        trainer().fit(model, batches())
    assert next(model.parameters()).device.type == "cpu"
    trainer().fit(Net(), batches(2))


# -- batches ahead -------------------------------------------------------------------------------------------


class Samples(Dataset):
    def __init__(self, count=40, fail_at=None):
        self.samples, self.fail_at = batches(count, 1), fail_at

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == self.fail_at:
            raise OSError(f"sample {index} can't be read")
        x, y = self.samples[index]
        return {"x": x[0], "y": y[0], "name": str(index)}


class OverSamples(Net):
    def loss(self, batch):
        assert isinstance(batch["name"], list)
        return super().loss((batch["x"], batch["y"]))


def ahead(count):
    from torchhal_xla.single import SingleXLAStrategy

    return SingleXLAStrategy(prefetch=count)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_ahead_are_the_same_batches(workers):
    threads = threading.active_count()
    models = []
    for strategy in (ahead(3), "single_xla"):
        model = OverSamples()
        torch.manual_seed(5)
        loader = DataLoader(Samples(), batch_size=8, shuffle=True, num_workers=workers)
        trainer(strategy, max_epochs=2).fit(model, loader, loader)
        models.append(model)
    assert_equal(*models)
    deadline = time.monotonic() + 30  # those of data workers' queues end a moment after them
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads


def test_batches_ahead_that_nobody_wants_are_let_go():
    threads = threading.active_count()
    trainer(ahead(2), limit_train_batches=1, max_epochs=2).fit(OverSamples(), DataLoader(Samples(), batch_size=4))
    assert threading.active_count() <= threads


def test_an_error_of_a_loaders_thread_is_raised():
    """torch_xla takes it for the end of the data."""
    with pytest.raises(OSError, match="sample 20 can't be read"):
        trainer(ahead(2)).fit(OverSamples(), DataLoader(Samples(fail_at=20), batch_size=4))


def test_batches_ahead_resume_where_they_were(tmp_path):
    class Saves(OverSamples):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2 and self.path:
                self.trainer.save_checkpoint(self.path)

    models = []
    for path, resume in ((str(tmp_path / "a.ckpt"), None), ("", str(tmp_path / "a.ckpt"))):
        model = Saves(dropout=0.5)
        model.path = path
        seed_everything(1)
        loader = DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=1)
        trainer(ahead(2)).fit(model, loader, ckpt_path=resume)
        models.append(model)
    assert_equal(*models)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [DDPStrategy(), SingleDeviceStrategy(), "ddp_forkserver"], ids=str)
def test_strategies_that_cut_no_graph_are_refused(strategy):
    with pytest.raises(UnsupportedCombinationError, match="is not made for accelerator 'xla'"):
        trainer(strategy, devices=1)


def test_devices_are_a_count(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert len(trainer("xla_spmd").plan.devices) == 4
    with pytest.raises(ConfigurationError, match=r"'devices' must be a count .*\(got \[2\]\)"):
        trainer(devices=[2])
    with pytest.raises(ConfigurationError, match=r"at most 4 for accelerator 'xla' \(got 5\)"):
        trainer(devices=5)


def test_no_spmd_after_a_single_device():
    trainer().fit(Net(), batches(1))
    with pytest.raises(ConfigurationError, match="has used an XLA device without SPMD"):
        trainer("xla_spmd", devices=1).fit(Net(), batches(1))


def test_names_that_mean_something_else_here():
    for asked, means in (("single_tpu", "single_xla"), ("none", "single_xla"), ("ddp_spawn", "xla"),
                         ("tpu_spawn", "xla"), ("ddp", "xla")):  # fmt: skip
        assert trainer(asked, devices=1).plan.strategy.alias == means
    assert trainer("auto").plan.checkpoint_io.alias == trainer(plugins="xla").plan.checkpoint_io.alias == "xla"


@pytest.mark.parametrize("prefetch", [-1, True, 1.5, "2"])
def test_a_prefetch_is_a_count(prefetch):
    with pytest.raises(ConfigurationError, match=r"'prefetch' must be an int of at least 0"):
        ahead(prefetch)
