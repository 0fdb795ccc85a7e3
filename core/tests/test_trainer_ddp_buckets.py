"""Test that a resumed ddp run sums gradients in the bucket order of the unbroken one."""

import warnings
from pathlib import Path

import hardware
import pytest
import torch
import torch.distributed as dist
from ddp_models import SaveAt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchhal import Module, Trainer
from torchhal.strategies import DDPStrategy
from torchhal.strategies import _ddp_buckets as ddp_buckets

pytestmark = pytest.mark.slow_on_sim


class Wide(Module):
    """Gradients of many sizes: with three ranks or more, each place in a buffer has its own order of summation."""

    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(3)
        sizes = [(8, 60), (60, 61), (61, 30), (30, 1)]
        layers = [layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(*layers[:-1])
        self.frozen = frozen

    def on_train_epoch_start(self):
        if self.frozen:
            self.layers[0].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch, batch_idx):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit_wide(callbacks=(), ckpt_path=None, frozen=False, strategy=None, **options):
    model = Wide(frozen)
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(9))
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    trainer = Trainer(
        **{"accelerator": hardware.name(), "devices": "auto", "max_epochs": 2, **options}, callbacks=list(callbacks),
        strategy=strategy or "ddp", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader, torch.utils.data.DataLoader(data[:24], 4), ckpt_path=ckpt_path)
    return trainer, {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}


def hooked():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return DDPStrategy(comm_hook=allreduce_hook, bucket_cap_mb=0.01, gradient_as_bucket_view=True)


def resume_everywhere(folder, frozen, with_hook):
    """Which of the places where a run was saved give other weights at its end, if it goes on from there."""
    options = {"frozen": frozen}
    make = hooked if with_hook else lambda: None
    _, whole = fit_wide(**options, strategy=make())
    _, saved = fit_wide([SaveAt(folder, [1, 2, 5, 9, 11])], **options, strategy=make())
    trainer, _ = fit_wide(max_steps=4, **options, strategy=make())
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.strategy.barrier()
    differ = [] if all(torch.equal(whole[name], saved[name]) for name in whole) else ["saving"]
    for path in sorted(Path(folder).glob("*.ckpt")):
        trainer, state = fit_wide(ckpt_path=path, **options, strategy=make())
        if not all(torch.equal(whole[name], state[name]) for name in whole):
            differ.append(path.name)
    return differ, len(list(Path(folder).glob("*.ckpt")))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(("frozen", "with_hook"), [(False, False), (True, False), (False, True)])
def test_resume_keeps_summation_order(request, tmp_path, size, frozen, with_hook):
    """DistributedDataParallel chooses its buckets anew after its first iteration."""
    world = request.getfixturevalue(f"world{size}")
    for differ, places in world.run(resume_everywhere, str(tmp_path), frozen, with_hook, timeout=90):
        assert places == 8 and differ == []


def resume_without(name, folder):
    """What a fit warns of on a torch without ``name``, its weights, and those of one that goes on from its middle."""
    owner, _, attribute = name.rpartition(".")
    owner = {"": DistributedDataParallel, "reducer": dist.Reducer}[owner]
    ddp_buckets._warn_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as noted:
        patch.delattr(owner, attribute)
        warnings.simplefilter("always")
        _, whole = fit_wide([SaveAt(folder, [2, 5, 9])], max_epochs=1)
        _, resumed = fit_wide(ckpt_path=f"{folder}/batch5.ckpt", max_epochs=1)
    return [str(warning.message) for warning in noted if attribute in str(warning.message)], whole, resumed


@pytest.mark.parametrize("name", ["_get_ddp_logging_data", "reducer._push_all_rebuilt_params"])
def test_resume_without_bucket_order(world2, tmp_path, name):
    """Two ranks add up the same in any order."""
    (said, whole, resumed), (other, _, _) = world2.run(resume_without, name, str(tmp_path))
    assert len(said) == 1 and f"DistributedDataParallel.{name}, by which" in said[0] and other == []
    for key, tensor in whole.items():
        assert torch.equal(resumed[key], tensor), key
    assert "ddp_bucket_order" not in torch.load(tmp_path / "batch9.ckpt", weights_only=True)["strategy"]


@pytest.fixture
def wrapper():
    """A wrapper of two layers in a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ddp_buckets._NAMES)
def test_bucket_order_needs_torch_names(wrapper, monkeypatch, name):
    """The bucket order is left alone on a torch without one of the names that it is read by."""
    wrapper(torch.ones(1, 2)).sum().backward()
    order = ddp_buckets.read_bucket_order(wrapper)
    assert sorted(order) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    path, _, attribute = name.rpartition(".")
    owner = getattr(wrapper, path) if path else wrapper
    monkeypatch.delattr(owner if attribute in getattr(owner, "__dict__", ()) else type(owner), attribute)
    ddp_buckets._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=name) as noted:
        assert ddp_buckets.read_bucket_order(wrapper) is None
        assert ddp_buckets.set_bucket_order(wrapper, order) is False
    assert len(noted) == 1


def save_in_accumulations(folder):
    _, whole = fit_wide(accumulate_grad_batches=2)
    _, saved = fit_wide([SaveAt(folder, [1, 3, 5])], accumulate_grad_batches=2)
    _, resumed = fit_wide(accumulate_grad_batches=2, ckpt_path=f"{folder}/batch5.ckpt")
    return whole, saved, resumed


def test_save_during_accumulation(world2, tmp_path):
    """A save amid an accumulation changes no weights."""
    for whole, saved, resumed in world2.run(save_in_accumulations, str(tmp_path)):
        for name, tensor in whole.items():
            assert torch.equal(saved[name], tensor), name
            torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6)
