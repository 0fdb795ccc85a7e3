"""BaseFinetuning and BackboneFinetuning: frozen at first, trained later, resumed exactly."""

import pytest
import torch
from quiet_trainer import make
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from torchhal import Callback, Module, Trainer
from torchhal.errors import CheckpointMismatchError, ConfigurationError, ModelError
from torchhal.strategies import SingleDeviceStrategy
from torchhal.trainer.callbacks import BackboneFinetuning, BaseFinetuning

SCHEDULERS = {
    None: None,
    "step": lambda optimizer: StepLR(optimizer, 2),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, 40),
    "plateau": lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "loss_epoch"},
}


class Net(Module):
    def __init__(self, scheduler=None, filters=True):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))
        self.scheduler, self.filters = SCHEDULERS[scheduler], filters
        self.rates = []

    def loss(self, batch):
        return self.head(self.backbone(batch)).pow(2).mean()

    def training_step(self, batch, batch_idx):
        self.rates.append([group["lr"] for group in self.optimizers().param_groups])
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("loss_epoch", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        trained = [each for each in self.parameters() if each.requires_grad or not self.filters]
        optimizer = torch.optim.Adam(trained, lr=0.1)
        return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])


ROWS = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


def loader():
    return DataLoader(ROWS, 4, shuffle=True)


def fit(*callbacks, model=None, ckpt_path=None, **options):
    model = model or Net()
    trainer = make(*callbacks, **{"max_epochs": 5, **options})
    torch.manual_seed(5)
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return trainer, model


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.filterwarnings("error")
def test_equals_a_plain_loop():
    trainer, model = fit(BackboneFinetuning(2, backbone_initial_ratio_lr=0.1))
    plain = Net()
    plain.train()
    norm = plain.backbone[1]
    plain.backbone.requires_grad_(False)
    norm.requires_grad_(True)
    early = list(norm.parameters())  # a batch norm is trained from the start
    optimizer = torch.optim.Adam([*early, *plain.head.parameters()], lr=0.1)
    torch.manual_seed(5)
    rate = 0.1 * 0.1
    batches = loader()
    for epoch in range(5):
        if epoch == 2:
            plain.backbone.requires_grad_(True)
            late = [each for each in plain.backbone.parameters() if all(each is not other for other in early)]
            optimizer.add_param_group({"params": late, "lr": rate})
        elif epoch > 2:
            rate = min(2.0 * rate, 0.1)
            optimizer.param_groups[1]["lr"] = rate
        for batch in batches:
            optimizer.zero_grad()
            plain.loss(batch).backward()
            optimizer.step()
    assert same(model, plain)
    assert [len(rates) for rates in model.rates[::4]] == [1, 1, 2, 2, 2] and model.rates[-1] == [0.1, rate]
    assert trainer.callbacks[0].previous_backbone_lr == rate


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"should_align": True, "lambda_func": lambda epoch: 10.0 * epoch}, [0.01, 0.1, 0.1]),
        ({"should_align": False, "lambda_func": lambda epoch: 10.0 * epoch}, [0.01, 0.3, 12.0]),
        ({"backbone_initial_lr": 0.05, "lambda_func": lambda epoch: 1.0}, [0.05, 0.05, 0.05]),
    ],
)
def test_rate_of_the_backbone(options, rates):
    _, model = fit(BackboneFinetuning(1, **options), max_epochs=4)
    assert [step[1] for step in model.rates[4::4]] == pytest.approx(rates)


def test_verbose(capsys):
    fit(BackboneFinetuning(1, verbose=True, rounding=3), max_epochs=2)
    assert "epoch 1: learning rate 0.1, of the backbone 0.01" in capsys.readouterr().out


class Thaw(BaseFinetuning):
    """Trains the backbone's first layer from epoch 1 on, its batch norm and last layer from epoch 3 on."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[0], optimizer)
        elif epoch == 3:
            self.unfreeze_and_add_param_group([module.backbone[1], module.backbone[2]], optimizer, lr=0.02)


def test_freezes_batch_norms():
    seen = []

    class Look(Callback):
        def on_train_epoch_end(self, trainer, module):
            norm = module.backbone[1]
            seen.append((norm.track_running_stats, norm.weight.requires_grad, int(norm.num_batches_tracked)))

    fit(Thaw(), Look())
    assert seen[:3] == [(False, False, 0)] * 3 and seen[3:] == [(True, True, 4), (True, True, 8)]


class Stop(Exception):
    pass


class SaveAndStop(Callback):
    def __init__(self, hook, epoch, path, batch=None, stops=True):
        self.epoch, self.path, self.batch, self.stops = epoch, path, batch, stops
        setattr(self, hook, self.act)

    def act(self, trainer, *args):
        if trainer.current_epoch == self.epoch and (self.batch is None or args[-1] == self.batch):
            trainer.save_checkpoint(self.path)
            if self.stops:
                raise Stop


@pytest.mark.parametrize("scheduler", [None, "step", "lambda", "plateau"])
@pytest.mark.parametrize("make_callback", [Thaw, lambda: BackboneFinetuning(1)], ids=["own", "backbone"])
@pytest.mark.parametrize(
    ("hook", "epoch", "batch"),
    [
        ("on_train_epoch_end", 0, None), ("on_train_batch_end", 1, 1), ("on_train_epoch_end", 2, None),
        ("on_train_batch_end", 3, 0), ("on_train_epoch_end", 3, None),
    ],
)  # fmt: skip
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, scheduler, make_callback, hook, epoch, batch):
    path = tmp_path / "here.ckpt"
    _, whole = fit(make_callback(), model=Net(scheduler))
    with pytest.raises(Stop):
        fit(make_callback(), SaveAndStop(hook, epoch, path, batch), model=Net(scheduler))
    _, again = fit(make_callback(), model=Net(scheduler), ckpt_path=path)
    assert same(whole, again) and again.rates == whole.rates[-len(again.rates) :]


def test_second_fit_goes_on():
    """Groups that the first fit added are there in the second one of the Trainer."""
    trainer, model = fit(BackboneFinetuning(1), max_epochs=3)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model, loader())
    assert [rates[1] for rates in model.rates[4::4]] == pytest.approx([0.01, 0.02, 0.04, 0.08])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_another_trainer_begins_anew():
    callback = BackboneFinetuning(1)
    fit(callback, max_epochs=3)
    _, model = fit(callback, max_epochs=1)
    assert model.rates == [[0.1]] * 4


def test_warns_of_an_optimizer_that_has_all():
    with pytest.warns(UserWarning, match="the Adam has 4 of the parameters to unfreeze already"):
        fit(BackboneFinetuning(1), model=Net(filters=False), max_epochs=2)


def test_refuses_a_model_without_backbone():
    model = Net()
    model.trunk, model.backbone = model.backbone, None
    with pytest.raises(ModelError, match="Net has no module 'backbone', which BackboneFinetuning freezes"):
        fit(BackboneFinetuning(1), model=model)


def test_refuses_a_scheduler_with_values_in_each_group():
    with pytest.raises(ConfigurationError, match="OneCycleLR can't take another parameter group while training"):
        fit(BackboneFinetuning(1), model=Net("one cycle"))


def test_refuses_an_engine_with_optimizers_of_its_own():
    class Engine(SingleDeviceStrategy):
        features = frozenset({"owns_optimizer_state"})

    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=Engine(), callbacks=BackboneFinetuning(1), logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="BackboneFinetuning can't be used with strategy 'Engine'"):
        trainer.fit(Net(), loader())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"unfreeze_backbone_at_epoch": -1}, ConfigurationError, "'unfreeze_backbone_at_epoch' must be an int"),
        ({"lambda_func": 2.0}, TypeError, "'lambda_func' must be a function"),
        ({"backbone_initial_ratio_lr": "a"}, TypeError, "'backbone_initial_ratio_lr' must be a number"),
        ({"backbone_initial_ratio_lr": 0}, ValueError, "'backbone_initial_ratio_lr' must be a positive finite number"),
        ({"backbone_initial_lr": -3}, ValueError, "'backbone_initial_lr' must be a positive finite number"),
        ({"initial_denom_lr": 0}, ValueError, "'initial_denom_lr' must be a positive finite number"),
        ({"train_bn": 1}, ConfigurationError, "'train_bn' must be a bool"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        BackboneFinetuning(**arguments)


def test_refuses_the_state_of_another_model(tmp_path):
    path = tmp_path / "here.ckpt"
    with pytest.raises(Stop):
        fit(BackboneFinetuning(0), SaveAndStop("on_train_epoch_end", 1, path))
    other = Net()
    other.backbone = nn.Sequential(nn.Linear(2, 4))
    with pytest.raises(CheckpointMismatchError, match=r"refuses its state.*has unfrozen 'backbone\.2"):
        fit(BackboneFinetuning(0), model=other, ckpt_path=path)


def test_modules():
    net = Net()
    layers = BaseFinetuning.flatten_modules(net.backbone)
    assert [type(each).__name__ for each in layers] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert BaseFinetuning.flatten_modules([net.backbone, net.head])[-1] is net.head[1]
    assert BaseFinetuning.flatten_modules(nn.ModuleDict({"a": net.backbone})) == layers
    BaseFinetuning.freeze(net.backbone)
    assert len(list(BaseFinetuning.filter_params(net, requires_grad=False))) == 4
    assert len(list(BaseFinetuning.filter_params(net, train_bn=False))) == 2


def thaw_in_ranks(folder, strategy):
    path, options = f"{folder}/here.ckpt", {"devices": 2, "strategy": strategy}
    _, whole = fit(Thaw(), SaveAndStop("on_train_batch_end", 3, path, 0, stops=False), **options)
    _, again = fit(Thaw(), ckpt_path=path, **options)
    return [{name: value.detach().clone() for name, value in model.named_parameters()} for model in (whole, again)]


def test_ranks(world2, tmp_path):
    """Under ddp all ranks train the same weights, and continue from them exactly."""
    (whole, again), (other, _) = world2.run(thaw_in_ranks, str(tmp_path), "ddp")
    assert all(torch.equal(whole[name], other[name]) and torch.equal(whole[name], again[name]) for name in whole)
