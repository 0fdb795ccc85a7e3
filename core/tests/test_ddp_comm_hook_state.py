"""Test that a ddp run goes on with the memory of its communication hook, as if it had never been interrupted."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_models import SaveAt
from torch import nn

from torchhal import Module, Trainer
from torchhal.strategies import DDPStrategy


class Wide(Module):
    """Two matrices that PowerSGD compresses, over several buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def training_step(self, batch, batch_idx):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Counting:
    """A hook's state with methods of its own: it adds a number to gradients that is another one each step."""

    def __init__(self):
        self.step = torch.zeros(())

    def state_dict(self):
        return {"step": self.step.clone()}

    def load_state_dict(self, state):
        self.step = state["step"]


class Opaque:
    pass


def averaged(tensor):
    future = dist.all_reduce(tensor.div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def counting_hook(state, bucket):
    if bucket.is_last():
        state.step += 1
    return averaged(bucket.buffer().add_(state.step * 1e-3))


def feedback_hook(state, bucket):
    """Round to eight steps of the largest and keep the error of each rank for its next step, in a plain dict."""
    state["steps"] = state.get("steps", 0) + bool(bucket.is_last())
    if state["steps"] < 2:  # torch chooses its buckets anew after the first step
        return averaged(bucket.buffer())
    whole = bucket.buffer() + state.get(bucket.index(), 0.0)
    size = whole.abs().max() / 8 + 1e-12
    rounded = (whole / size).round() * size
    state[bucket.index()] = whole - rounded
    return averaged(rounded)


def opaque_hook(state, bucket):
    return averaged(bucket.buffer())


def strategy(kind):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    options = {"bucket_cap_mb": 0.002}
    if kind.startswith("power"):
        warm = kind != "power_cold"  # without a warm start each step draws from the state's generator
        state = power.PowerSGDState(None, 1, start_powerSGD_iter=2, warm_start=warm, min_compression_rate=0.5)
        # in one bucket: the hook reduces in callbacks, which ranks may run in different orders for several
        return DDPStrategy(comm_hook=power.powerSGD_hook, comm_state=state)
    if kind == "local":
        return LocalSGD(**options)
    made = {
        "counting": (counting_hook, Counting), "feedback": (feedback_hook, dict), "opaque": (opaque_hook, Opaque),
        "none": (None, lambda: None), "allreduce": (opaque_hook, lambda: None),
    }  # fmt: skip
    hook, state = made[kind]
    return DDPStrategy(comm_hook=hook, comm_state=state(), **options)


class LocalSGD(DDPStrategy):
    """Each rank trains on its own from the third step on, without ever averaging."""

    def configure_ddp(self):
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local

        super().configure_ddp()
        state = local.PostLocalSGDState(None, dist.new_subgroups(group_size=1)[0], 2)
        self.model.register_comm_hook(state, local.post_localSGD_hook)


def fit(kind, callbacks=(), ckpt_path=None, model=None, **options):
    model = Wide() if model is None else model
    data = torch.randn(72, 8, generator=torch.Generator().manual_seed(9))
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": "auto", "max_epochs": 2, **options}, callbacks=list(callbacks),
        strategy=strategy(kind), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, 4, shuffle=True), ckpt_path=ckpt_path)
    return trainer, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def resume(folder, kind):
    """The places of a run at which a resumed one parts from it, and what the ranks hold of their own."""
    _, whole = fit(kind)
    trainer, saved = fit(kind, [SaveAt(folder, [1, 3, 4, 7])])
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.strategy.barrier()
    differ = [] if all(torch.equal(whole[name], saved[name]) for name in whole) else ["saving"]
    for path in sorted(Path(folder).glob("*.ckpt")):
        trainer, state = fit(kind, ckpt_path=path)
        if not all(torch.equal(whole[name], state[name]) for name in whole):
            differ.append(path.name)
    return differ, len(list(Path(folder).glob("*.ckpt"))), whole


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        "power",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("power_cold", "feedback", "counting", "local")),
    ],
)
def test_resume_equals_uninterrupted_run(request, tmp_path, size, kind):
    world = request.getfixturevalue(f"world{size}")
    answers = world.run(resume, str(tmp_path), kind, timeout=90)
    for differ, places, _ in answers:
        assert places >= 5 and differ == []
    first, other = answers[0][2], answers[-1][2]
    same = all(torch.equal(first[name], other[name]) for name in first)
    assert same == (kind != "local")
    file = torch.load(sorted(tmp_path.glob("batch*.ckpt"))[-1], weights_only=True)
    class_name = {"local": "LocalSGD", "power": "DDPStrategy"}.get(kind, "DDPStrategy")
    assert file["rank_states"]["strategy"]["class"].endswith(f".{class_name}")
    assert file["rank_states"]["strategy"]["world_size"] == size == len(file["ranks"])
    hooks = [entry["strategy"]["comm_hook"]["state"] for entry in file["ranks"]]
    if kind == "power":
        errors = [hook["error_dict"] for hook in hooks]
        assert errors[0] and all(not torch.equal(errors[0][key], errors[1][key]) for key in errors[0])
    assert [("module" in entry["strategy"]) for entry in file["ranks"]] == [kind == "local"] * size


def save(folder, kind):
    trainer, _ = fit(kind, [SaveAt(folder, [4])])
    trainer.strategy.barrier()


def go_on(path, kind):
    """What was warned of, and the error's class and message."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            fit(kind, ckpt_path=path)
        except Exception as error:
            return [], type(error).__name__, str(error)
    told = [str(warning.message) for warning in noted if "left out" in str(warning.message)]
    return told, "", ""


def test_powersgd_errors_are_averaged_for_another_world(world2, world3, tmp_path):
    """Three ranks with the mean error send what two with their own would have sent."""
    world2.run(save, str(tmp_path), "power")
    path = str(tmp_path / "batch4.ckpt")
    errors = [entry["strategy"]["comm_hook"]["state"]["error_dict"] for entry in torch.load(path)["ranks"]]
    for buckets in world3.run(first_errors, path):
        assert buckets.keys() == errors[0].keys() and buckets
        for number, error in buckets.items():
            assert torch.equal(error, (errors[0][number] + errors[1][number]) / 2)


def first_errors(path):
    errors = {}

    class Look(SaveAt):
        def on_train_start(self, trainer, module):
            errors.update({number: error.clone() for number, error in trainer.strategy.comm_state.error_dict.items()})

    fit("power", [Look("", ())], ckpt_path=path)
    return errors


@pytest.mark.parametrize("kind", ["counting", pytest.param("local", marks=pytest.mark.slow)])
def test_other_hooks_refuse_another_world(world2, world3, tmp_path, kind):
    world2.run(save, str(tmp_path), kind)
    for _, error, message in world3.run(go_on, str(tmp_path / "batch4.ckpt"), kind):
        assert error == "CheckpointMismatchError"
        assert "2 rank(s), and 3 continue(s)" in message and "checkpoint['rank_states'].pop('strategy')" in message


@pytest.mark.parametrize("kind", ["none", "feedback"])
def test_memory_of_another_hook_is_left_out(world2, tmp_path, kind):
    world2.run(save, str(tmp_path), "power")
    (told, error, message), (other, _, _) = world2.run(go_on, str(tmp_path / "batch4.ckpt"), kind)
    assert error == "", message
    assert len(told) == 1 and "torch.PowerSGDState" in told[0] and other == []


def save_opaque(folder):
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        save(folder, "opaque")
    return [str(warning.message) for warning in noted if "communication hook" in str(warning.message)]


def test_state_that_cannot_be_saved_is_named(world2, tmp_path):
    (told, _) = world2.run(save_opaque, str(tmp_path))
    assert told and "Opaque, isn't saved" in told[0]
    assert "rank_states" not in torch.load(tmp_path / "batch4.ckpt", weights_only=True)


@pytest.mark.parametrize("kind", ["none", "allreduce"])
def test_without_memory_nothing_is_saved(world2, tmp_path, kind):
    world2.run(save, str(tmp_path), kind)
    checkpoint = torch.load(tmp_path / "batch4.ckpt", weights_only=True)
    assert "rank_states" not in checkpoint and all("strategy" not in entry for entry in checkpoint["ranks"])
