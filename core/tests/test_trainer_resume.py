"""A run that was interrupted anywhere and continued equals one that was left alone, bit for bit."""

import random
import re
import warnings
from datetime import timedelta

import hardware
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from torchhal import Callback, DataModule, ModelCheckpoint, Module, Trainer, rng
from torchhal.errors import CheckpointMismatchError

pytestmark = pytest.mark.usefixtures("accelerator")


class Noisy(Dataset):
    """Augments each sample with every generator there is, in the main process or in a worker."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + numpy.random.rand()
        return torch.full((4,), float(index)) / 22 + 0.1 * noise.float(), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(22):
            yield torch.full((4,), float(index)) / 22 + 0.1 * torch.rand(4), index % 3


class Net(Module):
    def __init__(self, accumulate=1):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.body(x), y)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.body(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": epoch, "monitor": "val_loss"},
        ]


class Stop(Exception):
    pass


class SaveAndStop(Callback):
    """Writes a checkpoint the ``count``-th time that ``hook`` is called, then ends the run as a crash would."""

    def __init__(self, hook, count, path):
        self.left = count
        self.path = path
        setattr(self, hook, self.act)

    def act(self, trainer, *args):
        if trainer.sanity_checking:
            return
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)
            raise Stop


class Record(Callback):
    def __init__(self):
        self.epoch_losses = []

    def on_train_epoch_end(self, trainer, module):
        self.epoch_losses.append(trainer.callback_metrics["train_loss_epoch"].item())


def loader(kind):
    if kind == "shuffled":
        return DataLoader(Noisy(), 4, shuffle=True)
    if kind == "generator":
        return DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(9))
    if kind == "weighted":
        return DataLoader(Noisy(), 4, sampler=WeightedRandomSampler(torch.arange(22) + 1.0, 22))
    if kind == "workers":
        return DataLoader(Noisy(), 4, shuffle=True, num_workers=2)
    if kind == "stream":
        return DataLoader(Stream(), 4)
    if kind == "unbatched":
        return DataLoader(
            [(torch.rand(4, 4), torch.tensor([0, 1, 2, 0])) for _ in range(6)], batch_size=None, shuffle=True
        )
    raise AssertionError(kind)


def fit(kind, callbacks, *, ckpt_path=None, given=True, **options):
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    model = Net()
    data = loader(kind) if given else None
    model.train_dataloader = lambda: loader(kind)
    defaults = {
        "accelerator": hardware.name(), "devices": 1, "max_epochs": 3, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = Trainer(callbacks=callbacks, **{**defaults, **options})
    try:
        trainer.fit(model, data, DataLoader(Noisy(), 8), ckpt_path=ckpt_path)
    except Stop:
        pass
    return trainer, model


def check(tmp_path, kind, hook, count, **options):
    path = tmp_path / "here.ckpt"
    alone, whole = Record(), None
    whole_trainer, whole = fit(kind, [alone], **options)
    _, first = fit(kind, [SaveAndStop(hook, count, path)], **options)
    assert path.exists(), "the run ended before it was interrupted"
    torch.rand(7)  # whatever happened in between
    again = Record()
    second_trainer, second = fit(kind, [again], ckpt_path=path, **options)
    saved = torch.load(path, weights_only=True)
    done = saved["loops"]["fit"]["total_batches"]
    assert 0 < done < len(whole.losses)
    assert first.losses[:done] + second.losses == whole.losses
    for (name, a), (_, b) in zip(whole.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert (second_trainer.global_step, second_trainer.current_epoch) == (
        whole_trainer.global_step,
        whole_trainer.current_epoch,
    )
    assert again.epoch_losses == pytest.approx(alone.epoch_losses[-len(again.epoch_losses) :], abs=0, rel=1e-12)
    schedulers = [
        [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        for trainer in (whole_trainer, second_trainer)
    ]
    assert schedulers[0] == schedulers[1]


PLACES = [
    ("on_train_batch_end", 1),
    ("on_train_batch_end", 4),
    ("on_train_batch_end", 6),  # the last of an epoch, before its validation
    ("on_train_batch_end", 7),
    ("on_train_batch_end", 14),
    ("on_validation_end", 1),
    ("on_validation_end", 2),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_end", 2),
]


@pytest.mark.parametrize(("hook", "count"), PLACES)
@pytest.mark.parametrize("kind", ["shuffled", "generator", "weighted", "unbatched", "stream"])
def test_everywhere(tmp_path, kind, hook, count):
    check(tmp_path, kind, hook, count)


@pytest.mark.parametrize("kind", ["generator", "weighted"])
@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("given", [True, False], ids=["object", "method"])
def test_resume_from_epoch_end(tmp_path, kind, given, every):
    """The epoch is over: the next one goes on with the loader's own generator, unless it has a new loader."""
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    options = {"reload_dataloaders_every_n_epochs": every, "given": given}
    _, whole = fit(kind, [keep], enable_checkpointing=True, **options)
    for epoch in range(2):
        _, second = fit(kind, [], ckpt_path=tmp_path / f"epoch={epoch}.ckpt", **options)
        assert second.losses == whole.losses[6 * (epoch + 1) :]


@pytest.mark.parametrize(
    ("hook", "count"), [("on_train_batch_end", 3), ("on_train_batch_end", 8), ("on_validation_end", 1)]
)
def test_with_workers_whose_generators_have_advanced(tmp_path, hook, count):
    check(tmp_path, "workers", hook, count)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_in_the_midst_of_an_accumulation(tmp_path, count):
    check(tmp_path, "shuffled", "on_train_batch_end", count, accumulate_grad_batches=4, gradient_clip_val=0.1)


@pytest.mark.parametrize(
    ("hook", "count"), [("on_validation_end", 1), ("on_validation_end", 2), ("on_train_batch_end", 4)]
)
def test_with_validation_inside_the_epoch(tmp_path, hook, count):
    check(tmp_path, "shuffled", hook, count, val_check_interval=2)


def test_with_validation_counted_across_epochs(tmp_path):
    check(tmp_path, "shuffled", "on_train_batch_end", 8, val_check_interval=4, check_val_every_n_epoch=None)


def test_with_limits(tmp_path):
    check(tmp_path, "shuffled", "on_train_batch_end", 5, limit_train_batches=4, limit_val_batches=1)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
def test_in_other_precisions(tmp_path, precision):
    check(tmp_path, "shuffled", "on_train_batch_end", 4, precision=precision)


def test_a_finished_run_goes_on_with_more_epochs(tmp_path):
    _, whole = fit("shuffled", [], max_epochs=3)
    trainer, first = fit("shuffled", [], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    _, second = fit("shuffled", [], max_epochs=3, ckpt_path=tmp_path / "two.ckpt")
    assert len(first.losses) + len(second.losses) == len(whole.losses)
    assert first.losses + second.losses == whole.losses


def test_resume_after_max_steps_within_epoch(tmp_path):
    """A run that max_steps ended within an epoch continues there."""
    _, whole = fit("shuffled", [], max_steps=11)
    trainer, first = fit("shuffled", [], max_steps=8)
    trainer.save_checkpoint(tmp_path / "eight.ckpt")
    _, second = fit("shuffled", [], max_steps=11, ckpt_path=tmp_path / "eight.ckpt")
    assert first.losses + second.losses == whole.losses


class Clamped(Module):
    """Goes on in a hook of its own after each step, validation or epoch, with everything that a checkpoint holds."""

    def __init__(self, hook):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("average", torch.zeros(3, 4))
        setattr(self, hook, self.go_on)

    def go_on(self, *args):
        if self.trainer.sanity_checking:
            return
        with torch.no_grad():
            self.layer.weight.clamp_(-0.3, 0.3)
            self.average.lerp_(self.layer.weight, 0.1)
        self.optimizers().param_groups[0]["lr"] *= 0.9

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit_clamped(hook, callbacks, **options):
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    model = Clamped(hook)
    trainer = Trainer(
        accelerator=hardware.name(), devices=1, max_epochs=3, logger=False, callbacks=callbacks,
        enable_checkpointing=bool(callbacks), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Noisy(), 4), DataLoader(Noisy(), 8), **options)
    return {**model.state_dict(), "lr": torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])}


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("on_train_batch_end", {"every_n_train_steps": 4}),
        ("on_train_batch_end", {"train_time_interval": timedelta(microseconds=1)}),
        ("on_validation_end", {"save_on_train_epoch_end": False, "every_n_epochs": 1}),
        ("on_train_epoch_end", {"save_on_train_epoch_end": True}),
    ],
)
def test_checkpoint_after_model_hook(tmp_path, hook, options):
    """The checkpoint holds the changes that the model's own hook has made."""
    whole = fit_clamped(hook, [])
    again = fit_clamped(hook, [ModelCheckpoint(tmp_path, save_top_k=-1, **options)])
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) >= 3
    for path in paths:
        for name, value in fit_clamped(hook, [], ckpt_path=path).items():
            assert torch.equal(value, whole[name]) and torch.equal(again[name], whole[name]), (path.name, name)


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end",
        "on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
        "on_validation_end", "on_train_epoch_end", "on_train_end",
    ],
)  # fmt: skip
def test_runs_after_module(hook):
    """A callback may ask to be called after the model."""
    events = []
    late, early = Callback(), Callback()
    late.runs_after_module = True
    model = Net()
    for owner, name in ((late, "late"), (early, "early"), (model, "model")):
        setattr(owner, hook, lambda *args, name=name: events.append(name))
    Trainer(
        accelerator=hardware.name(), devices=1, max_epochs=2, logger=False, callbacks=[late, early],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, DataLoader(Noisy(), 4), DataLoader(Noisy(), 8))  # fmt: skip
    assert events and events == ["early", "model", "late"] * (len(events) // 3)


class Thawed(Net):
    """Trains its layers by turns: each change is made in one hook only, so that a resumed run doesn't make it again."""

    def __init__(self, start="init", hook="on_train_epoch_start"):
        super().__init__()
        self.start = start
        if start == "init":
            self.freeze()
        setattr(self, hook, self.change)

    def freeze(self):
        self.body[0].requires_grad_(False)

    def setup(self, stage):
        if self.start == "setup":
            self.freeze()

    def on_train_start(self):
        if self.start == "on_train_start":
            self.freeze()

    def change(self, *args):
        if self.trainer.global_step == 6:
            self.body[0].requires_grad_(True)
        if self.trainer.global_step == 12:
            self.body[4].requires_grad_(False)


def fit_thawed(callbacks=(), model=None, **options):
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    model = Thawed() if model is None else model()
    options = {"max_epochs": 4, **options}
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(
        accelerator=hardware.name(), devices=1, logger=False, enable_checkpointing=False, callbacks=list(callbacks),
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, loader("shuffled"), DataLoader(Noisy(), 8), ckpt_path=ckpt_path)
    return model


class SaveAll(Callback):
    runs_after_module = True

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batches}.ckpt")


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values())) and [
        each.requires_grad for each in one.parameters()
    ] == [each.requires_grad for each in other.parameters()]


@pytest.mark.parametrize(
    ("start", "hook"),
    [
        ("init", "on_train_epoch_start"),
        ("on_train_start", "on_train_batch_end"),
        pytest.param("setup", "on_train_batch_end", marks=pytest.mark.slow),
        pytest.param(None, "on_train_epoch_start", marks=pytest.mark.slow),
    ],
)
def test_what_was_frozen_and_unfrozen_stays_so(tmp_path, start, hook):
    def model():
        return Thawed(start, hook)

    whole = fit_thawed([SaveAll(tmp_path)], model)
    for batch in (3, 6, 8, 12, 15):
        assert same(fit_thawed(model=model, ckpt_path=tmp_path / f"{batch}.ckpt"), whole), batch
    again = tmp_path / "again"
    again.mkdir()
    fit_thawed([SaveAll(again)], model, ckpt_path=tmp_path / "8.ckpt", max_epochs=3)
    assert same(fit_thawed(model=model, ckpt_path=again / "10.ckpt"), whole), "continued twice"


def test_unfrozen_within_accumulation(tmp_path):
    """A layer that was unfrozen within an accumulation stays so after a resumption."""

    def model():
        return Thawed(hook="on_train_batch_start")

    options = {"accumulate_grad_batches": 3, "max_epochs": 5}
    whole = fit_thawed([SaveAll(tmp_path)], model, **options)
    for batch in (17, 20):
        assert same(fit_thawed(model=model, ckpt_path=tmp_path / f"{batch}.ckpt", **options), whole), batch


def test_second_fit_keeps_initial_freezing(tmp_path):
    """The second fit of a process keeps which layers were frozen when the first began."""
    model = fit_thawed([SaveAll(tmp_path)], max_epochs=2)
    second = tmp_path / "second"
    second.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_thawed([SaveAll(second)], lambda: model, ckpt_path=tmp_path / "12.ckpt", max_epochs=3)
    assert same(fit_thawed(ckpt_path=second / "15.ckpt"), fit_thawed())


def test_changed_freezing_warns(tmp_path):
    """A model that freezes other layers now keeps them so, with a warning."""
    fit_thawed([SaveAll(tmp_path)], max_epochs=2)

    class Otherwise(Thawed):
        def freeze(self):
            self.body[4].bias.requires_grad_(False)

        def change(self, *args):
            pass

    with pytest.warns(UserWarning, match="'body.0.bias', 'body.0.weight' there alone and 'body.4.bias' here alone"):
        model = fit_thawed(model=Otherwise, ckpt_path=tmp_path / "12.ckpt", max_epochs=3)
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["body.4.bias"]


def test_frozen_field_in_checkpoint(tmp_path):
    """A checkpoint names frozen parameters only if there are any."""
    fit_thawed([SaveAll(tmp_path)], max_epochs=2)
    layer = ["body.0.bias", "body.0.weight"]
    assert torch.load(tmp_path / "6.ckpt", weights_only=True)["frozen"] == {"at_start": layer, "at_save": layer}
    assert torch.load(tmp_path / "7.ckpt", weights_only=True)["frozen"] == {"at_start": layer, "at_save": []}
    fit_thawed([SaveAll(tmp_path)], Net, max_epochs=1)
    assert "frozen" not in torch.load(tmp_path / "3.ckpt", weights_only=True)


def test_checkpoint_without_frozen_field(tmp_path):
    """An older checkpoint leaves the freezing to the model."""
    fit_thawed([SaveAll(tmp_path)], max_epochs=2)
    checkpoint = torch.load(tmp_path / "12.ckpt", weights_only=True)
    del checkpoint["frozen"], checkpoint["digests"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fit_thawed(ckpt_path=tmp_path / "old.ckpt", max_epochs=3)
    assert not model.body[0].weight.requires_grad


class Stateful:
    """A loader that keeps its own position."""

    def __init__(self):
        self.position = 0

    def __len__(self):
        return 6

    def __iter__(self):
        while self.position < 6:
            self.position += 1
            yield torch.full((4, 4), float(self.position)), torch.tensor([0, 1, 2, 0])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_loader_with_own_position(tmp_path):
    """A loader that keeps its own position restores it."""
    seen = []

    class Spy(Net):
        def training_step(self, batch, batch_idx):
            seen.append(int(batch[0][0, 0]))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    path = tmp_path / "x.ckpt"
    quiet = {
        "accelerator": hardware.name(),
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    with pytest.raises(Stop):
        Trainer(max_epochs=1, callbacks=[SaveAndStop("on_train_batch_end", 2, path)], **quiet).fit(Spy(), Stateful())
    Trainer(max_epochs=1, callbacks=[Callback()], **quiet).fit(Spy(), Stateful(), ckpt_path=path)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_foreign_device_random_state():
    """The random state of another kind of device is left alone."""
    tested, device = hardware.accelerator(), hardware.device()
    tested.setup_device(device)
    state = {**rng.collect(tested, device), "device": torch.zeros(3, dtype=torch.uint8), "device_type": "other"}
    expected = torch.rand(4, device=device)
    rng.restore(state, tested, device)
    if device.type == "cpu":
        assert torch.equal(torch.rand(4), expected)
    else:
        assert not torch.equal(torch.rand(4, device=device), expected), "it went on"


def test_changed_replica_count_warns(tmp_path):
    """Processes that share their batches are one replica: 2 of these may be as many processes as 1 of those."""
    path = tmp_path / "x.ckpt"
    trainer, _ = fit("shuffled", [], max_epochs=1)
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    [rank] = checkpoint["ranks"]
    checkpoint["ranks"] = [{**rank, "share": [2, replica]} for replica in (0, 0, 1, 1)]
    del checkpoint["digests"]
    torch.save(checkpoint, path)
    says = (
        f"{str(path)!r} was written by 2 replica(s) of the model on 4 process(es) and is continued by 1 replica(s) of "
        "the model on 1 process(es). The next epoch is shared out among all. Random numbers, of dropout say, are "
        "others than they would have been"
    )
    with pytest.warns(UserWarning, match=re.escape(says)):
        fit("shuffled", [], max_epochs=2, ckpt_path=path)


class Numbered(Net):
    """Notes the samples that it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[1].flatten().tolist()
        return self.body(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_numbered(loader, *callbacks, ckpt_path=None, **options):
    model = Numbered()
    trainer = Trainer(
        accelerator=hardware.name(), devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    try:
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    except Stop:
        pass
    return model


def numbered(count, batch_size, *, shuffle=True):
    return DataLoader([(torch.ones(4), index) for index in range(count)], batch_size, shuffle=shuffle)


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (3, 6)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_with_other_batch_size(tmp_path, before, now, accumulate):
    """A run with another batch size continues after the samples that were seen."""
    path = tmp_path / "x.ckpt"
    stop = SaveAndStop("on_train_batch_end", 4, path)
    first = fit_numbered(numbered(24, before), stop, accumulate_grad_batches=accumulate)
    said = (
        rf"x.ckpt' is continued with other data. A batch has {now} sample\(s\), not {before} as before. The epoch goes "
        rf"on after its first {4 * before} samples, at batch {4 * before // now}. "
    )
    with pytest.warns(UserWarning, match=said):
        second = fit_numbered(numbered(24, now), ckpt_path=path, accumulate_grad_batches=accumulate)
    assert sorted(first.seen + second.seen[: 24 - len(first.seen)]) == list(range(24)), "each once"
    assert sorted(second.seen[24 - len(first.seen) :]) == list(range(24))


def test_another_batch_size_between_two_epochs_is_said(tmp_path):
    path = tmp_path / "x.ckpt"
    fit_numbered(numbered(24, 4), SaveAndStop("on_train_epoch_start", 2, path))
    said = r"A batch has 8 sample\(s\), not 4 as before. An optimizer step takes 8 samples, not 4 as before"
    with pytest.warns(UserWarning, match=said):
        model = fit_numbered(numbered(24, 8), ckpt_path=path)
    assert sorted(model.seen) == list(range(24))


@pytest.mark.parametrize(
    ("hook", "loaders", "said"),
    [
        (
            "on_train_batch_end",
            (numbered(24, 4), numbered(20, 4)),
            "The training data has 20 samples, not 24 as before. The epoch goes on at batch 3, in the order of now.",
        ),
        (
            "on_train_epoch_end",
            (numbered(24, 4), numbered(28, 4)),
            "The training data has 28 samples, not 24 as before.",
        ),
        (
            "on_train_batch_end",
            ([[torch.ones(2, 4), torch.zeros(2)]] * 6, [[torch.ones(2, 4), torch.zeros(2)]] * 5),
            "The training data has 5 batches, not 6 as before. The epoch goes on at batch 3, in the order of now.",
        ),
        (
            "on_train_batch_end",
            (
                DataLoader(numbered(8, 4).dataset, 2, sampler=WeightedRandomSampler([1.0] * 8, 12)),
                DataLoader(numbered(8, 4).dataset, 2, sampler=WeightedRandomSampler([1.0] * 8, 14)),
            ),
            "The training data has 7 batches, not 6 as before.",
        ),
    ],
    ids=["shorter", "longer", "a list", "a sampler"],
)
def test_other_lengths_are_said(tmp_path, hook, loaders, said):
    path = tmp_path / "x.ckpt"
    fit_numbered(loaders[0], SaveAndStop(hook, 1 if "epoch" in hook else 3, path))
    with pytest.warns(UserWarning, match=f"x.ckpt' is continued with other data. {re.escape(said)}"):
        fit_numbered(loaders[1], ckpt_path=path)


def test_the_same_data_is_not_remarked_on(tmp_path, recwarn):
    path = tmp_path / "x.ckpt"
    fit_numbered(numbered(24, 4), SaveAndStop("on_train_batch_end", 3, path))
    fit_numbered(numbered(24, 4), ckpt_path=path)
    assert not [str(warning.message) for warning in recwarn if "continued" in str(warning.message)]


def test_weights_alone_are_refused_by_name(tmp_path):
    trainer, _ = fit("shuffled", [], max_epochs=1)
    path = tmp_path / "weights.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(CheckpointMismatchError, match="holds weights only"):
        fit("shuffled", [], ckpt_path=path)


def test_another_models_checkpoint_is_refused_by_name(tmp_path):
    trainer, _ = fit("shuffled", [], max_epochs=1)
    path = tmp_path / "net.ckpt"
    trainer.save_checkpoint(path)

    class Other(Net):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))

    with pytest.raises(CheckpointMismatchError, match=r"(?s)don't belong to Other.*body\.0\.weight"):
        Trainer(
            accelerator=hardware.name(),
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        ).fit(Other(), loader("shuffled"), ckpt_path=path)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        fit("shuffled", [], ckpt_path="nowhere.ckpt")


class Staged(DataModule):
    """Hands out other data from its second run on, as a curriculum does; its state knows which is on."""

    def __init__(self):
        self.stage, self.asked = 0, []

    def loader(self, kind):
        self.asked.append((kind, self.stage))
        return DataLoader([(torch.full((4,), float(self.stage)), 0)] * 4, batch_size=2)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("validate")

    def test_dataloader(self):
        return self.loader("test")

    def state_dict(self):
        return {"stage": self.stage}

    def load_state_dict(self, state):
        self.stage = state["stage"] + 1


class Estimates(Net):
    def configure_optimizers(self):
        self.trainer.estimated_stepping_batches  # noqa: B018  # which asks for the training loader
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def test_step(self, batch, batch_idx):
        self.seen = batch[0][0, 0].item()


@pytest.mark.parametrize("model", [Net, Estimates])
def test_data_module_state_before_loaders(tmp_path, model):
    """A data module has its state before its loaders are made."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
    quiet |= {"accelerator": hardware.name(), "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(model(), datamodule=Staged())
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    resumed = Staged()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # continued with other data
        Trainer(max_epochs=2, **quiet).fit(model(), datamodule=resumed, ckpt_path=tmp_path / "first.ckpt")
    assert resumed.asked == [("train", 1), ("validate", 1)]
    tested, net = Staged(), Estimates()
    Trainer(**quiet).test(net, datamodule=tested, ckpt_path=tmp_path / "first.ckpt", verbose=False)
    assert tested.asked == [("test", 1)]
    assert net.seen == 1.0
