"""dp against one device on the same global batch: weights, evaluation, checkpoints, and what is refused."""

import copy
import dataclasses

import models
import pytest
import torch
import torch.utils.checkpoint
from batch_parts import (
    BATCHES,
    CPU,
    PLACES,
    Answer,
    Item,
    Losses,
    dataset,
    everywhere,
    greatest,
    make,
    reference,
    train,
    two_devices,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback, ModelCheckpoint, Module
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal_parallel.data_parallel import DataParallelStrategy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


# -- training --------------------------------------------------------------------------------------------------


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


# -- evaluation ------------------------------------------------------------------------------------------------


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


# -- checkpoints -----------------------------------------------------------------------------------------------


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
def test_dropout_differs_between_parts(place):
    """Dropout of the parts differs and from batch to batch."""
    masks = []

    class Drops(models.ConvNet):
        def forward(self, images):
            masks.append(tuple(F.dropout(torch.ones(64, device=images.device)).tolist()))
            return super().forward(images)

    make(place, limit_train_batches=4).fit(Drops(), DataLoader(dataset(models.ConvNet), 8))
    assert len(masks) == len(set(masks)) == 8


# -- refusals --------------------------------------------------------------------------------------------------


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


def test_a_dict_from_one_part_alone_is_refused():
    class Wrong(models.ConvNet):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss} if len(batch[0]) == 2 else loss

    with pytest.raises(ModelError, match="the parts of a batch gave different things"):
        make(("cpu", 2)).fit(Wrong(), DataLoader(dataset(models.ConvNet), 5))
