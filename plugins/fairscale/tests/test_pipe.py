"""What fairscale_pipe trains is what one device trains; what parts of a batch would change is refused."""

import copy
import pickle
import sys
import threading

import parity_models
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from torchhal import ModelCheckpoint, Trainer
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal_fairscale import FairscalePipeStrategy

pytestmark = [pytest.mark.usefixtures("fairscale"), pytest.mark.timeout(120)]

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0, "enable_checkpointing": False, "max_epochs": 2,
}  # fmt: skip


def fit(model, strategy="single_device", devices=2, **options):
    if strategy == "pipe":
        strategy = FairscalePipeStrategy()
    devices = 1 if strategy == "single_device" else devices
    trainer = Trainer(**{
        **QUIET, "strategy": strategy, "devices": devices, "gradient_clip_val": model.clip,
        "accumulate_grad_batches": model.accumulate, **options,
    })  # fmt: skip
    trainer.fit(model, DataLoader(model.dataset(), batch_size=8))
    return {name: value.clone() for name, value in model.state_dict().items()}, model.losses


def same(found, expected, tolerance=0.0):
    state, losses = found
    for name, value in expected[0].items():
        assert torch.allclose(state[name], value, rtol=tolerance, atol=tolerance), name
    assert losses == pytest.approx(expected[1], rel=tolerance or 1e-12)


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        (name, checkpoint)
        for name in parity_models.MODELS
        for checkpoint in ("always", "except_last", "never")
        if (name, checkpoint) != ("convolution", "always")  # a batch norm would count its batch twice: refused
    ],
)
def test_one_micro_batch_equals_one_device_to_the_bit(name, checkpoint):
    strategy = FairscalePipeStrategy(chunks=1, checkpoint=checkpoint)
    same(fit(parity_models.MODELS[name](), strategy), fit(parity_models.MODELS[name]()))


@pytest.mark.parametrize("name", ["perceptron", "attention", "tied", "accumulated"])
def test_micro_batches_equal_one_device_but_for_rounding(name):
    strategy = FairscalePipeStrategy(chunks=4)
    options = {"precision": "64-true"}  # Adam makes full steps of the rounding of gradients that are zero
    same(
        fit(parity_models.MODELS[name](), strategy, devices=3, **options),
        fit(parity_models.MODELS[name](), **options),
        1e-9,
    )


class Net(parity_models.Perceptron):
    """A net whose layers a test makes."""

    layers = None

    def build(self):
        return nn.Sequential(*type(self).layers())


def net(*layers, **attributes):
    return type("Net", (Net,), {"layers": staticmethod(lambda: [layer() for layer in layers]), **attributes})()


def linear(first=64, second=4):
    return lambda: nn.Linear(first, second)


def test_batch_norm_is_refused_with_several_micro_batches_and_when_computed_again():
    with pytest.raises(ModelError, match="BatchNorm2d, would compute its statistics"):
        fit(parity_models.Convolution(), "pipe")
    with pytest.raises(ModelError, match="checkpoint='never'"):
        fit(parity_models.Convolution(), FairscalePipeStrategy(chunks=1, checkpoint="always"))


class SequenceFirst(nn.Module):
    """An LSTM that has samples along the second dimension."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(64, 64)

    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


def test_layers_that_have_samples_along_another_dimension_are_refused():
    with pytest.raises(ModelError, match="divides a batch along its first dimension"):
        fit(net(SequenceFirst, nn.Tanh, linear()), "pipe")


class OwnBatchNorm(nn.Module):
    """Normalises by the batch in training, and not in evaluation."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1) if self.training else x


class Counting(nn.Module):
    """Counts its batches, and gives the buffer another tensor each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x


class Scaling(Counting):
    """Computes with the number of its batches."""

    def forward(self, x):
        return super().forward(x) * float(self.count)


def spectral():
    return parametrizations.spectral_norm(nn.Linear(64, 64))


class InPlace(nn.Module):
    """A layer that writes to its buffer, the same each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.last.fill_(3.0)
        return x


class FunctionalDropout(nn.Module):
    """Draws random numbers without a layer for it."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


def encoder():
    return nn.Sequential(
        nn.Unflatten(1, (8, 8)), nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), nn.Flatten()
    )


@pytest.mark.parametrize(
    ("layers", "options", "said"),
    [
        ((OwnBatchNorm, linear()), {}, "compute something else with parts of it than with all of it"),
        ((OwnBatchNorm, nn.Dropout, linear()), {}, "compute something else with parts of it than with all of it"),
        ((Counting, linear()), {"checkpoint": "never"}, "buffer '0.count' of them changes with each time"),
        ((spectral, linear()), {"checkpoint": "never"}, "compute something else|buffer '0.parametrizations.weight"),
        ((spectral, linear()), {"chunks": 1, "checkpoint": "always"}, "computes layers again in backward, and buffer"),
        ((Scaling, linear()), {"chunks": 1, "checkpoint": "always"}, "use checkpoint='never'"),
    ],
)
def test_layers_that_differ_in_training_alone_are_refused(layers, options, said):
    with pytest.raises(ModelError, match=said):
        fit(net(*layers), FairscalePipeStrategy(**options))


@pytest.mark.parametrize(
    "layers",
    [(FunctionalDropout, linear()), (encoder, linear()), (InPlace, linear())],
    ids=["drops", "encodes", "fills"],
)
def test_layers_that_draw_or_write_the_same_are_trained(layers):
    fit(net(*layers), "pipe")


@pytest.mark.parametrize("layer", [Counting, spectral])
def test_buffers_of_layers_that_run_once_are_those_of_one_device(layer):
    strategy = FairscalePipeStrategy(chunks=1)
    torch.manual_seed(1)
    found = fit(net(layer, linear()), strategy)
    torch.manual_seed(1)
    same(found, fit(net(layer, linear())))


def test_the_comparison_leaves_modes_buffers_and_generators_as_they_were():
    class Notes(InPlace):
        def forward(self, x):
            seen.append((self.training, float(self.last[0])))
            return super().forward(x)

    seen, results = [], []
    for strategy in (FairscalePipeStrategy(chunks=1, checkpoint="always"), "single_device"):
        torch.manual_seed(5)
        model = net(linear(64, 64), nn.Dropout, Notes, linear())
        results.append(fit(model, strategy, max_epochs=1))
        assert model.body[1].training
    same(*results)
    assert seen[:3] == [(True, 0.0), (True, 3.0), (True, 0.0)]  # compared, computed again, trained


def test_a_copy_of_the_model_made_in_a_run_is_a_plain_one():
    model = parity_models.Perceptron()
    x, copies = torch.randn(4, 64), []
    model.on_train_start = lambda: copies.extend([copy.deepcopy(model.body), pickle.loads(pickle.dumps(model.body))])
    before = model.body(x)
    fit(model, "pipe")
    assert all(torch.equal(each(x), before) for each in copies)
    again = parity_models.Perceptron()
    expected = fit(parity_models.Perceptron(), "pipe")
    again.body = copies[0]
    same(fit(again, "pipe"), expected)


class Pair(nn.Module):
    """A layer that takes a tuple."""

    def forward(self, both):
        return both[0] * both[1]


def test_tensors_of_different_lengths_are_refused_where_pipe_would_leave_samples_out():
    model = net(Pair, linear())
    model.forward = lambda x: model.body((x, torch.ones(1, 64)))
    with pytest.raises(ModelError, match="tensors of 8, 1 samples"):
        fit(model, "pipe")
    from fairscale.nn import Pipe

    pipe = Pipe(nn.Sequential(Pair(), nn.Identity()), [1, 1], devices=["cpu", "cpu"], chunks=2)
    assert len(pipe((torch.ones(8, 2), torch.ones(1, 2)))) == 4  # what Pipe itself makes of it


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "64-true"])
def test_precisions(precision):
    options = {"precision": precision}
    found = fit(parity_models.Perceptron(), FairscalePipeStrategy(chunks=1), **options)
    same(found, fit(parity_models.Perceptron(), **options))


def test_autocast_reaches_the_layers_which_pipe_runs_in_threads_without_it():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append((threading.current_thread() is threading.main_thread(), x.dtype))
            return x

    fit(net(linear(64, 64), Spy, linear()), "pipe", precision="bf16-mixed")
    assert {dtype for _, dtype in seen} == {torch.bfloat16}
    assert any(not in_main_thread for in_main_thread, _ in seen)


def test_dropout_draws_the_same_in_layers_that_are_computed_again():
    layers = (linear(64, 64), nn.Dropout, nn.Tanh, linear())
    results = []
    for checkpoint in ("always", "never"):
        torch.manual_seed(7)
        results.append(fit(net(*layers), FairscalePipeStrategy(checkpoint=checkpoint)))
    same(*results)


def test_resumes_under_one_device_and_back(tmp_path):
    folder = str(tmp_path)
    for number, (saved_by, resumed_by) in enumerate([("pipe", "single_device"), ("single_device", "pipe")]):
        callback = ModelCheckpoint(dirpath=f"{folder}/{number}", save_top_k=-1)
        options = {"enable_checkpointing": True, "max_epochs": 3, "callbacks": [callback]}
        one = FairscalePipeStrategy(chunks=1)
        trained = fit(parity_models.Perceptron(), one if saved_by == "pipe" else saved_by, **options)
        model = parity_models.Perceptron()
        trainer = Trainer(**{
            **QUIET, "devices": 2 if resumed_by == "pipe" else 1, "max_epochs": 3,
            "strategy": FairscalePipeStrategy(chunks=1) if resumed_by == "pipe" else resumed_by,
        })  # fmt: skip
        path = next(tmp_path.glob(f"{number}/epoch=0*"))
        trainer.fit(model, DataLoader(model.dataset(), batch_size=8), ckpt_path=str(path))
        assert model.losses == trained[1][-len(model.losses) :]
        assert all(torch.equal(value, trained[0][name]) for name, value in model.state_dict().items())


def test_a_run_leaves_nothing_behind_and_one_object_runs_again():
    before, strategy, model = threading.active_count(), FairscalePipeStrategy(), parity_models.Perceptron()
    fit(model, strategy)
    assert "forward" not in vars(model.body)
    assert threading.active_count() == before  # Pipe itself doesn't wait until its threads have ended
    first = model.losses[:]
    assert fit(parity_models.Perceptron(), strategy)[1] == first
    fit(model, strategy)
    assert model.losses[: len(first)] == first


def test_evaluation_goes_through_the_pipe():
    model = parity_models.Perceptron()
    model.validation_step = lambda batch, batch_idx: model.log("loss", model.loss(batch))
    loader = DataLoader(model.dataset(), batch_size=8)
    found = [
        Trainer(**{**QUIET, "strategy": strategy, "devices": devices}).validate(model, loader, verbose=False)
        for strategy, devices in ((FairscalePipeStrategy(), 2), ("single_device", 1))
    ]
    assert float(found[0][0]["loss"]) == pytest.approx(float(found[1][0]["loss"]), rel=1e-6)


def test_a_layer_replaced_in_the_run_is_trained():
    model = parity_models.Perceptron()

    def replace():
        if model.current_epoch == 1:
            model.body[4] = nn.Linear(32, 4)
            nn.init.zeros_(model.body[4].weight), nn.init.zeros_(model.body[4].bias)

    model.on_train_epoch_start = replace
    losses = fit(model, "pipe")[1]
    assert losses[6] == pytest.approx(torch.tensor(4.0).log().item())  # what four equal logits give


def test_an_exit_of_a_layer_ends_the_run():
    """Pipe's thread would end, and the caller wait for it without end."""

    class Exit(nn.Module):
        def forward(self, x):
            sys.exit(3)

    with pytest.raises(SystemExit):
        fit(net(linear(), Exit), FairscalePipeStrategy(chunks=1))


class TwoBodies(parity_models.Perceptron):
    """A model with two of them."""

    def build(self):
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        return super().build()


class NoBody(parity_models.Perceptron):
    """A model without one."""

    def build(self):
        return nn.Linear(64, 4)


class OwnForward(nn.Sequential):
    """A Sequential that does more."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [
        (NoBody, {}, ModelError, "NoBody has none"),
        (
            TwoBodies,
            {},
            ConfigurationError,
            r"FairscalePipeStrategy\(layers='body'\)|FairscalePipeStrategy\(layers='head'\)",
        ),
        (parity_models.Perceptron, {"layers": "nothing"}, ConfigurationError, "'layers' must name"),
        (parity_models.Perceptron, {"balance": [1, 1]}, ConfigurationError, "must share 5 layers out to 2 devices"),
        (lambda: net(linear()), {}, ConfigurationError, "can't give 1 layers to 2 devices"),
    ],
)
def test_refused_by_name(make, options, error, said):
    with pytest.raises(error, match=said):
        fit(make(), FairscalePipeStrategy(**options))


def test_a_sequential_with_a_forward_of_its_own_is_not_divided():
    model = parity_models.Perceptron()
    model.body = OwnForward(*model.body)
    with pytest.raises(ModelError, match="has none"):
        fit(model, "pipe")


def test_one_layer_in_two_places_is_refused():
    model = net(linear(64, 64), nn.Tanh)
    model.body.append(model.body[0])
    with pytest.raises(ModelError, match="fairscale's Pipe can't divide the layers: module with duplicate children"):
        fit(model, "pipe")


def test_several_nodes_are_refused():
    with pytest.raises(UnsupportedCombinationError, match="from one process"):
        fit(parity_models.Perceptron(), "fairscale_pipe", num_nodes=2)


def test_manual_optimization_and_named_layers():
    class Manual(TwoBodies):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(float(loss.detach()))

    same(fit(Manual(), FairscalePipeStrategy(layers="body", balance=[2, 3], chunks=1)), fit(Manual()))
