"""Training on the stub, compared with plain PyTorch."""

import contextlib
import copy
import logging
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from modelling import Net, difference, loader, made, plain, samples, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import poptorch
from torchhal import Callback, ModelCheckpoint
from torchhal_ipu import IPUMixedPrecision, IPUStrategy
from torchhal_ipu import _step_tracing as step_tracing

CLOSE = 2e-6


def options(**given):
    made = poptorch.Options()
    for name, value in given.items():
        getattr(made, name)(value)
    return made


# -- the same numbers as on a single device ------------------------------------------------------------------


def each_optimizer_trains_as_in_plain_torch():
    for kind in ("sgd", "adam", "adamw", "rmsprop"):
        model, reference = made(Net, kind, "epoch"), made(Net, kind, "epoch")
        run = trainer()
        run.fit(model, loader(16), loader(20))
        losses = plain(reference, 16)
        assert difference(model, reference) < CLOSE, kind
        assert run.global_step == 12
        assert abs(float(run.callback_metrics["loss_epoch"]) - sum(losses[6:]) / 6) < 1e-5
        whole = F.cross_entropy(reference(samples().tensors[0]), samples().tensors[1])
        assert abs(float(run.callback_metrics["val"]) - float(whole)) < 1e-5, "the last, smaller batch counts, too"
        assert type(model) is Net and type(model.head.weight) is nn.Parameter, "the module is the user's again"


def iterations_replicas_and_accumulation_make_one_batch():
    model, reference = made(), made()
    run = trainer(devices=2, accumulate_grad_batches=3, strategy=IPUStrategy(device_iterations=2))
    run.fit(model, loader(4))
    losses = plain(reference, 24)
    assert difference(model, reference) < CLOSE
    assert (run.global_step, run.fit_loop.total_batches) == (8, 4)
    assert abs(float(run.callback_metrics["loss_epoch"]) - sum(losses[4:]) / 4) < 1e-5
    predictions = torch.cat(run.predict(model, loader(5)))
    assert (predictions - reference(samples().tensors[0])).abs().max() < 1e-5, "in the order of the data"


def options_of_the_user_mean_the_same():
    training = options(deviceIterations=2, replicationFactor=2)
    training.Training.gradientAccumulation(3)
    model, reference = made(), made()
    run = trainer(devices=2, strategy=IPUStrategy(training_options=training))
    run.fit(model, loader(4))
    plain(reference, 24)
    assert difference(model, reference) < CLOSE and run.global_step == 8
    training.deviceIterations(1)  # they are still the user's


def schedulers_reach_the_device():
    model, reference = made(Net, "sgd", "step"), made(Net, "sgd", "step")
    run = trainer()
    run.fit(model, loader(16))
    plain(reference, 16)
    assert difference(model, reference) < CLOSE
    model = made(Net, "sgd", "step")
    run = trainer(strategy=IPUStrategy(device_iterations=3), max_epochs=1)
    run.fit(model, loader(16))
    assert abs(run.optimizers[0].param_groups[0]["lr"] - 0.1 * 0.8**6) < 1e-9, "one for each optimizer step"


def a_rate_that_a_callback_sets_reaches_the_device():
    class Warm(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            trainer.optimizers[0].param_groups[0]["lr"] = 0.0 if trainer.global_step < 6 else 0.1

    model, start = made(), made()
    trainer(max_epochs=1, callbacks=[Warm()]).fit(model, loader(16))
    assert difference(model, start) == 0


class Change(Callback):
    """Sets something of the optimizer before the third batch, and keeps the device's loss scaling of each."""

    def __init__(self, change):
        self.change, self.scalings = change, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            self.change(trainer.optimizers[0])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.scalings.append(float(trainer.optimizers[0].state_dict()["ipu_param"]["lossScaling"]))


def a_loss_scaling_that_a_callback_sets_reaches_the_device():
    change = Change(lambda optimizer: setattr(optimizer, "loss_scaling", 256.0))
    trainer(max_epochs=1, precision=IPUMixedPrecision(64.0), callbacks=[change]).fit(made(), loader(16))
    assert change.scalings == [64, 64, 256, 256, 256, 256]


def what_is_a_constant_of_the_step_cannot_change():
    def changed(function, words, **flags):
        refused(words, trainer(callbacks=[Change(function)], **flags).fit, made(Net, "adam"), loader(16))

    changed(lambda optimizer: setattr(optimizer, "loss_scaling", 2.0), "'loss_scaling' of Adam is a constant")
    changed(lambda optimizer: setattr(optimizer, "max_grad_norm", 2.0), "from 1.0 to 2.0: leave it as it is",
            gradient_clip_val=1.0)  # fmt: skip
    variable = Change(lambda optimizer: optimizer.param_groups[0].update(eps=1e-4, weight_decay=0.1, lr=0.5, own=1))
    trainer(callbacks=[variable]).fit(made(Net, "adam"), loader(16))
    decay = Change(lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.1))
    refused("'weight_decay' of RMSprop is a constant", trainer(callbacks=[decay]).fit, made(Net, "rmsprop"), loader(16))


def gradients_are_clipped_by_norm():
    for kind in ("sgd", "adamw"):
        model, reference = made(Net, kind), made(Net, kind)
        trainer(accumulate_grad_batches=2, gradient_clip_val=0.05).fit(model, loader(8))
        plain(reference, 16, clip=0.05)
        assert difference(model, reference) < 1e-5, kind


class Awkward(Net):
    """Tied, frozen, unused and 0-dim parameters; a dict for the loss; a count and a prediction beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seen = []

    def forward(self, x):
        return super().forward(self.second(self.first(x).relu()) * self.frozen * self.scale)

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["y"]
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log_dict({"loss": loss, "right": (logits.argmax(1) == y).float().sum()}, reduce_fx="sum", on_epoch=True)
        return {"loss": loss, "best": logits.argmax(1), "name": batch["name"]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)


def models_with_oddities_train():
    model, reference = made(Awkward), made(Awkward)
    data = [{"x": x, "y": y, "name": "digits"} for x, y in loader(16)]
    run = trainer(accumulate_grad_batches=2, max_epochs=1)
    run.fit(model, data)
    plain(reference, 16, epochs=1)
    assert difference(model, reference) < CLOSE
    assert model.second.weight is model.first.weight and model.unused.tolist() == [1, 1, 1]
    assert all(out["best"].shape == (16,) and out["best"].dtype is torch.int64 for out in model.seen)
    assert model.seen[0]["name"] == "digits" and model.seen[0]["loss"].shape == ()
    right = sum(int((out["best"] == batch["y"]).sum()) for out, batch in zip(model.seen, data, strict=True))
    assert float(run.callback_metrics["right_epoch"]) == right


class Counting(Net):
    def __init__(self, count):
        super().__init__()
        self.count, self.outputs = count, []

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "n": self.count(batch[0])}

    def predict_step(self, batch, batch_idx):
        return self.count(batch[0])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs)


def numbers_that_a_step_returns():
    """Four micro-batches of two samples, in each call."""
    flags = {"devices": 2, "accumulate_grad_batches": 2, "max_epochs": 1}
    of_call = {
        "floats": (lambda x: x[0, 0], lambda x: x[::2, 0].mean()),
        "whole": (lambda x: (x[:, 0] > 0).sum(), lambda x: (x[:, 0] > 0).view(4, 2).sum(1)),
        "truths": (lambda x: x[0, 0] > 0, lambda x: x[::2, 0] > 0),
    }
    for name, (of_micro_batch, of_batch) in of_call.items():
        model = Counting(of_micro_batch)
        trainer(**flags).fit(model, loader(2, 32))
        for outputs, x in zip(model.outputs, samples(32).tensors[0].split(8), strict=True):
            expected = of_batch(x)
            assert outputs["n"].dtype is expected.dtype and outputs["n"].shape == expected.shape, name
            assert torch.allclose(outputs["n"].double(), expected.double()), name
    for count, words in ((len, "2"), (lambda x: 0.5, "0.5"), (lambda x: True, "True")):
        model = Counting(count)
        refused(f"Counting.training_step returns {words}, which would be", trainer(**flags).fit, model, loader(2))
        refused("Counting.predict_step returns", trainer().predict, model, loader(2))
    refused("an object of class ndarray", trainer().predict, Counting(lambda x: torch.ones(3).numpy()), loader(2))


def what_a_step_logs_is_known_by_its_arguments_names():
    class Results:
        def log(self, name, value, hook, inserted=None, reduce_fx="mean", batch_size=None):
            raise AssertionError("a step that is recorded logs nothing")

    results, logged, values = Results(), [], []
    with step_tracing._captured(results, "step", logged, values):
        results.log("positional", torch.ones(1), "hook", 7, "sum", 4)
        results.log(value=torch.zeros(()), name="named", hook="hook")
    assert [value.item() for value in values] == [1, 0]
    assert [(entry.name, entry.reduction) for entry in logged] == [("positional", "sum"), ("named", "mean")]
    others = {"hook": "hook", "inserted": 7, "reduce_fx": "sum"}
    assert logged[0].arguments(3) == {**others, "batch_size": 12} and logged[1].arguments(3)["batch_size"] is None


def what_is_frozen_in_the_midst_stays():
    class Thaw(Callback):
        def on_train_epoch_start(self, trainer, module):
            module.head.requires_grad_(trainer.current_epoch == 0)
            if trainer.current_epoch == 1:
                self.head = copy.deepcopy(module.head.state_dict())

    model, thaw = made(), Thaw()
    before = copy.deepcopy(model.state_dict())
    trainer(callbacks=[thaw]).fit(model, loader(16))
    assert not torch.equal(before["head.weight"], thaw.head["weight"])
    assert torch.equal(model.head.weight, thaw.head["weight"])
    assert not torch.equal(model.body[0].weight, before["body.0.weight"])


# -- one device, several executors ---------------------------------------------------------------------------


def all_ipus_are_handed_over_between_training_and_evaluation():
    """There are four, and each kind of step wants them all."""

    class Watch(Callback):
        values = []

        def on_validation_end(self, trainer, module):
            self.values.append(float(trainer.callback_metrics["val"]))

    model = made()
    run = trainer(devices=4, val_check_interval=2, callbacks=[Watch()], max_epochs=1)
    run.fit(model, loader(4), loader(8))
    assert len(Watch.values) == 4 and len(set(Watch.values)) == 4, "each validation sees newer weights"
    (after,) = run.validate(model, loader(8), verbose=False)
    assert abs(after["val"] - Watch.values[-1]) < 1e-6
    assert len(run.predict(model, loader(8))) == 3


def several_validation_loaders():
    class Two(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", F.cross_entropy(self(batch[0]), batch[1]) + dataloader_idx)

    model = made(Two)
    run = trainer(max_epochs=1)
    run.fit(model, loader(16), [loader(16), loader(12)])
    metrics = run.callback_metrics
    assert abs(float(metrics["val/dataloader_idx_1"]) - float(metrics["val/dataloader_idx_0"]) - 1) < 1e-5


def the_weights_on_the_host_are_the_devices_in_a_checkpoint():
    folder = Path(tempfile.mkdtemp())
    model, reference = made(), made()
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1)
    trainer(enable_checkpointing=True, callbacks=[keep], max_steps=5).fit(model, loader(16))
    (saved,) = folder.glob("*step=3*")
    made_by = torch.load(saved, weights_only=True)["state_dict"]
    assert all(type(value) is torch.Tensor for value in made_by.values())
    optimizer = reference.configure_optimizers()
    for x, y in list(loader(16))[:3]:
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    assert max(float((made_by[name] - value).abs().max()) for name, value in reference.state_dict().items()) < CLOSE


class Dropping(Net):
    def __init__(self):
        super().__init__("adamw", "step")
        self.body.append(nn.Dropout(0.3))
        self.body.append(nn.BatchNorm1d(16))


def a_run_resumes_in_the_midst_of_an_epoch():
    """Weights, the device's optimizer state and random numbers, the scheduler and the place in the shuffled data."""
    folder = Path(tempfile.mkdtemp())

    def go(ckpt_path=None, seed=0, **limits):
        torch.manual_seed(seed)
        model = Dropping()
        keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=-1)
        run = trainer(enable_checkpointing=True, callbacks=[keep], **limits)
        run.fit(model, loader(16, shuffle=True, generator=torch.Generator().manual_seed(3)), ckpt_path=ckpt_path)
        return model, run

    whole, _ = go()
    (at,) = folder.glob("*step=4*")
    resumed, run = go(ckpt_path=at, seed=5)
    assert run.global_step == 12 and difference(whole, resumed) == 0


def a_state_from_elsewhere_is_refused():
    folder = Path(tempfile.mkdtemp())
    trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=True,
            callbacks=[ModelCheckpoint(dirpath=folder)]).fit(made(), loader(16))  # fmt: skip
    (at,) = folder.glob("*.ckpt")
    refused("keeps another state", trainer().fit, made(), loader(16), ckpt_path=at)
    assert len(trainer().predict(made(), loader(16), ckpt_path=at)) == 6, "its weights are anybody's"


# -- precision -----------------------------------------------------------------------------------------------


class Seeing(Net):
    dtypes = ()

    def training_step(self, batch, batch_idx):
        hidden = self.body[0](batch[0])
        self.dtypes = (batch[0].dtype, self.body[0].weight.dtype, hidden.dtype)
        return super().training_step(batch, batch_idx)


def half_precisions():
    reference = made()
    losses = plain(reference, 16)
    for precision, weights in (("16-true", torch.float16), ("16-mixed", torch.float32)):
        model = made(Seeing)
        run = trainer(precision=precision)
        run.fit(model, loader(16))
        assert model.dtypes == (torch.float16, weights, torch.float16)
        assert model.head.weight.dtype is weights
        assert abs(float(run.callback_metrics["loss_epoch"]) - sum(losses[6:]) / 6) < 0.02, precision
    assert run.optimizers[0].loss_scaling == 128.0
    run = trainer(precision=IPUMixedPrecision("auto"), max_steps=1)
    run.fit(made(), loader(16))
    assert run.optimizers[0].loss_scaling == 1.0


# -- data ----------------------------------------------------------------------------------------------------


def data_is_combined_and_what_is_left_over_is_said():
    run = trainer(max_epochs=1, accumulate_grad_batches=4)
    with said() as warnings:
        run.fit(made(), loader(10, 96))
    assert "the last 16 of 96 samples of an epoch are not trained on" in warnings[0]
    assert type(run.train_dataloader) is poptorch.DataLoader
    assert run.train_dataloader.combinedBatchSize == 40 and run.global_step == 2
    own = poptorch.DataLoader(options(deviceIterations=2), samples(), batch_size=8)
    run = trainer(max_epochs=1, strategy=IPUStrategy(device_iterations=2))
    run.fit(made(), own)
    assert run.train_dataloader is own and run.global_step == 12
    refused("was made with options for deviceIterations(2)", trainer().fit, made(), own)
    ragged = [next(iter(loader(16))), next(iter(loader(8)))]
    refused("must be alike", trainer().fit, made(), ragged)
    refused("must be a multiple of 2", trainer(devices=2).fit, made(), list(loader(15)))
    named = [{"x": x, "y": y, "name": str(index)} for index, (x, y) in enumerate(loader(16))]
    refused("differ in something else than their tensors", trainer().fit, made(Awkward), named)
    arrays = [{"x": x, "y": y, "name": [x.numpy()]} for x, y in loader(16)]
    refused("a batch has a ndarray of shape (16, 6) in it", trainer().fit, made(Awkward), arrays)
    numbers = [{"x": x, "y": y, "name": "digits", "weight": x.numpy().dtype.type(2)} for x, y in loader(16)]
    trainer(max_epochs=1).fit(made(Awkward), numbers)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


class Weighed(Net):
    def validation_step(self, batch, batch_idx):
        self.log("first", batch[0][:, 0].mean(), batch_size=len(batch[0]))


def loaders_of_all_kinds():
    """Shuffled, with workers, endless; and a mean over batches of several sizes."""
    model, reference = made(), made()
    given = {"shuffle": True, "generator": torch.Generator().manual_seed(3), "num_workers": 2}
    trainer(devices=2, max_epochs=1).fit(model, loader(8, **given, persistent_workers=True))
    given["generator"] = torch.Generator().manual_seed(3)
    trainer(accelerator="cpu", max_epochs=1).fit(reference, loader(16, **given))
    assert difference(model, reference) < CLOSE
    model, reference = made(), made()
    run = trainer(devices=2, max_epochs=1)
    run.fit(model, DataLoader(Stream(), batch_size=8))
    plain(reference, 16, epochs=1)
    assert difference(model, reference) < CLOSE and run.global_step == 6
    (metrics,) = trainer(devices=2).validate(made(Weighed), loader(20), verbose=False)
    assert abs(metrics["first"] - float(samples().tensors[0][:, 0].mean())) < 1e-6


def a_lone_batch_that_cannot_be_dealt_out_is_evaluated():
    """Three samples on two replicas: by themselves, in a fit, and as the second of two loaders."""

    class Two(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    @torch.no_grad()
    def expected(model):
        x, y = samples(3).tensors
        return model(x), float(F.cross_entropy(model(x), y))

    model = made()
    logits, loss = expected(model)
    (predicted,) = trainer(devices=2).predict(model, loader(2, 3))
    assert (predicted - logits).abs().max() < 1e-6
    (metrics,) = trainer(devices=2).validate(model, loader(2, 3), verbose=False)
    assert abs(metrics["val"] - loss) < 1e-6
    for cls, given, name in (
        (Net, loader(2, 3), "val"),
        (Two, [loader(2, 8), loader(2, 3)], "val/dataloader_idx_1"),
    ):
        model = made(cls)
        run = trainer(devices=2, max_epochs=1)
        run.fit(model, loader(8), given)
        assert abs(float(run.callback_metrics[name]) - expected(model)[1]) < 1e-5, name
    refused("must be a multiple of 2", trainer(devices=2).validate, made(), list(loader(3, 3)), verbose=False)


def the_planned_number_of_steps_is_that_of_the_optimizer():
    class Planning(Net):
        def configure_optimizers(self):
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    model = made(Planning)
    run = trainer(devices=2, accumulate_grad_batches=2, strategy=IPUStrategy(device_iterations=2))
    run.fit(model, loader(4))
    assert model.planned == run.global_step == 12


@contextlib.contextmanager
def said():
    """What is logged by torchhal's logger while this is entered."""
    handler = logging.Handler()
    lines = []
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchhal").addHandler(handler)
    yield lines
    logging.getLogger("torchhal").removeHandler(handler)


# -- what can't be -------------------------------------------------------------------------------------------


def refused(words, function, *args, **given):
    try:
        function(*args, **given)
    except Exception as error:
        assert words in str(error), f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"nothing was refused: {words}")
    if args and isinstance(args[0], nn.Module):
        assert all(type(parameter) is nn.Parameter for parameter in args[0].parameters()), words
    assert poptorch._poplar_executor.machine.free() == 4, "the IPUs are free after an error"


class Manual(Net):
    automatic_optimization = False


class Several(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.body.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class Part(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.body.parameters(), 0.1)


class Optimized(Net):
    options = {}
    cls = torch.optim.SGD

    def configure_optimizers(self):
        return self.cls(self.parameters(), lr=0.1, **self.options)


def what_a_compiled_step_cannot_do_is_refused():
    def given(name, value, base=Net):
        return made(type("Given", (base,), {name: value}))

    def step(function):
        return given("training_step", function)

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def fit(words, model, data=None, **flags):
        refused(words, trainer(**flags).fit, model, data or loader(16))

    fit("use automatic optimization", made(Manual))
    fit("must return one optimizer for IPUs (got 2)", made(Several))
    fit("hasn't got 'head.weight', 'head.bias'", made(Part))
    bounded = made()
    bounded.rows = nn.Embedding(3, 2, max_norm=1.0)
    fit("'rows' is an Embedding with max_norm=1.0, which writes to its weight", bounded)
    fit("must return one optimizer for IPUs (got 0)", given("configure_optimizers", lambda self: None))
    fit("IPUs have no Adagrad", given("cls", torch.optim.Adagrad, Optimized))
    fit("no SGD with maximize=True", given("options", {"maximize": True}, Optimized))
    fit("clip gradients in SGD, Adam, AdamW, not in RMSprop", made(Net, "rmsprop"), gradient_clip_val=1.0)
    fit("by norm only", made(), gradient_clip_val=1.0, gradient_clip_algorithm="value")
    for hook in ("on_after_backward", "on_before_zero_grad", "on_before_optimizer_step", "optimizer_step"):
        fit(f"{hook} of Given can't be called", given(hook, lambda self, *args, **kwargs: None))
    fit("use on_train_batch_start", made(), callbacks=[type("C", (Callback,), {"on_before_zero_grad": print})()])
    fit("can't look into a compiled step", made(), detect_anomaly=True)
    fit("must be a multiple of the device iterations, 4", made(), max_steps=6,
        strategy=IPUStrategy(device_iterations=4))  # fmt: skip
    fit("None would skip a batch", step(lambda self, batch, index: None))
    fit("take its mean", step(lambda self, batch, index: self(batch[0])))
    fit("uses batch_idx", step(lambda self, batch, index: loss(self, batch) * (index % 2)))
    fit("asks for the value of a tensor", step(lambda self, batch, index: loss(self, batch).item()))
    fit("which would be that number for ever", step(lambda self, batch, index: self.log("a", 0.5)))
    fit("leave one of them out", made(), accumulate_grad_batches=2,
        strategy=IPUStrategy(training_options=poptorch.Options().deviceIterations(1), device_iterations=1,
                             inference_options=options(replicationFactor=2)))  # fmt: skip
    twice = options(deviceIterations=3)
    fit("device iterations are given twice: 3 in 'training_options', and 2 by device_iterations=2", made(),
        strategy=IPUStrategy(training_options=twice, device_iterations=2))  # fmt: skip
    twice = poptorch.Options()
    twice.Training.gradientAccumulation(3)
    fit("and 2 by accumulate_grad_batches=2", made(), accumulate_grad_batches=2,
        strategy=IPUStrategy(training_options=twice))  # fmt: skip
    fit("and 4 by devices=4", made(), devices=4, strategy=IPUStrategy(training_options=options(replicationFactor=2)))
    fit("must leave gradientAccumulation at 1", made(), strategy=IPUStrategy(inference_options=twice))
    fit("OutputMode.Sum", made(), strategy=IPUStrategy(training_options=options(outputMode=poptorch.OutputMode.Sum)))
    fit("must be poptorch.Options", made(), strategy=IPUStrategy(training_options={"deviceIterations": 2}))
    fit("must be a power of two", made(), devices=3)
    processes = poptorch.Options()
    processes.Distributed.configureProcessId(0, 2)
    fit("drives all IPUs from one process", made(), strategy=IPUStrategy(training_options=processes))
    fit("broadcastBuffers(False)", made(Dropping), devices=2)


def options_pass_through():
    folder = Path(tempfile.mkdtemp())
    strategy = IPUStrategy(cache_dir=str(folder / "cache"), profile_dir=str(folder / "profile"))
    kept = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            kept.append(trainer.strategy._training.executor.options)

    trainer(strategy=strategy, callbacks=[Look()], max_steps=1).fit(made(), loader(16))
    popart = kept[0]._Popart.options
    assert popart["cachePath"] == str(folder / "cache") and popart["enableEngineCaching"]
    assert popart["engineOptions"]["autoReport.directory"] == str(folder / "profile")
    assert kept[0].random_seed == torch.initial_seed() % 2**31


def a_model_over_two_ipus():
    class Pipelined(Net):
        def forward(self, x):
            with poptorch.Block("body", ipu_id=0):
                hidden = self.body(x)
            poptorch.Block.start("head", ipu_id=1)
            return self.head(hidden)

    model, reference = made(Pipelined), made()
    strategy = IPUStrategy(ipus_per_replica=2, inference_options=options(deviceIterations=2))
    run = trainer(devices=4, strategy=strategy, accumulate_grad_batches=3)
    run.fit(model, loader(4), loader(8))
    plain(reference, 24)
    assert difference(model, reference) < CLOSE and run.global_step == 8
    (metrics,) = run.validate(model, loader(4, 17), verbose=False)  # 16 fill the pipelines, and one is left
    x, y = samples(17).tensors
    logits = reference(x).detach()
    assert abs(metrics["val"] - float(F.cross_entropy(logits, y))) < 1e-5
    assert (torch.cat(run.predict(model, loader(4, 17))) - logits).abs().max() < 1e-5


CHECKS = [
    each_optimizer_trains_as_in_plain_torch, iterations_replicas_and_accumulation_make_one_batch,
    options_of_the_user_mean_the_same, schedulers_reach_the_device, a_rate_that_a_callback_sets_reaches_the_device,
    a_loss_scaling_that_a_callback_sets_reaches_the_device, what_is_a_constant_of_the_step_cannot_change,
    gradients_are_clipped_by_norm, models_with_oddities_train, numbers_that_a_step_returns,
    what_a_step_logs_is_known_by_its_arguments_names, what_is_frozen_in_the_midst_stays,
    all_ipus_are_handed_over_between_training_and_evaluation, several_validation_loaders,
    the_weights_on_the_host_are_the_devices_in_a_checkpoint, a_run_resumes_in_the_midst_of_an_epoch,
    a_state_from_elsewhere_is_refused, half_precisions, data_is_combined_and_what_is_left_over_is_said,
    loaders_of_all_kinds, a_lone_batch_that_cannot_be_dealt_out_is_evaluated,
    the_planned_number_of_steps_is_that_of_the_optimizer,
    what_a_compiled_step_cannot_do_is_refused,
    options_pass_through, a_model_over_two_ipus,
]  # fmt: skip

if __name__ == "__main__":
    chosen = CHECKS[int(sys.argv[2]) :: 2] if sys.argv[1:2] == ["--half"] else [
        check for check in CHECKS if check.__name__ in sys.argv[1:]
    ]  # fmt: skip
    failed = []
    for check in chosen:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            failed.append(check.__name__)
        assert poptorch._poplar_executor.machine.free() == 4, check.__name__
    assert chosen and not failed, failed
    print("all right")
