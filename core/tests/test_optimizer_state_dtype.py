"""Test that an optimizer's state keeps the dtypes that the precision gives it, in a run and across a resume."""

import pytest
import torch
from stochastic_rounding import StochasticRounding, fit, resume

from torchhal import Callback, Trainer
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import Precision, TruePrecision
from torchhal.strategies import SingleDeviceStrategy


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_resume_on_one_device_equals_uninterrupted_run(tmp_path, optimizer):
    """bfloat16 weights with float32 moments and random rounding continue with every digit."""
    differ, runs, dtypes, weights = resume(str(tmp_path), optimizer, "single_device")
    assert differ == [] and runs == 3
    assert dtypes == {torch.float32} and weights == {torch.bfloat16}


def resume_ddp(folder, optimizer):
    return resume(folder, optimizer, "ddp")


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_resume_under_ddp_equals_uninterrupted_run(world2, tmp_path, optimizer):
    for differ, runs, dtypes, weights in world2.run(resume_ddp, str(tmp_path), optimizer, timeout=60):
        assert differ == [] and runs == 3
        assert dtypes == {torch.float32} and weights == {torch.bfloat16}


def test_torch_alone_rounds_the_moments(tmp_path):
    """What the hook is for: without it a resume casts the moments to the dtype of the weights."""

    class Plain(StochasticRounding):
        def optimizer_state_dtype(self, parameter, name):
            return None

    fit("AdamW", "single_device", [Saving(tmp_path / "x.ckpt")], precision=Plain())
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"][0]["state"][0]
    assert state["exp_avg"].dtype is torch.float32
    model = torch.nn.Linear(6, 8, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([model.weight])
    optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.bfloat16


class Saving(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


class Narrow(Precision):
    """Momentum of float32 weights in bfloat16, by the name of the state only."""

    def optimizer_state_dtype(self, parameter, name):
        return torch.bfloat16 if name == "momentum_buffer" and parameter.dim() == 2 else None

    def optimizer_step(self, optimizer, closure=None):
        for entry in optimizer.state.values():
            for name, value in entry.items():
                entry[name] = value.float()
        return super().optimizer_step(optimizer, closure)


def test_new_state_is_converted_in_its_first_step(tmp_path):
    """A state is in the precision's dtype after the step that creates it, and None leaves it to torch."""
    _, _, watch = fit("SGD", "single_device", precision=Narrow(), max_steps=1)
    dtypes = {value.dim(): value.dtype for _, value in watch.seen[0]}
    assert dtypes == {2: torch.bfloat16, 1: torch.float32}


class Engine(SingleDeviceStrategy):
    features = frozenset({"owns_optimizer_state"})


@pytest.mark.parametrize(("precision", "refused"), [(StochasticRounding(), True), (TruePrecision("bfloat16"), False)])
def test_engine_with_own_state_refuses(precision, refused):
    """An engine that stores the state by its own rules refuses a precision that chooses dtypes, naming both."""

    def make():
        return Trainer(accelerator="cpu", strategy=Engine(), plugins=[precision], logger=False)

    if not refused:
        make()
        return
    with pytest.raises(UnsupportedCombinationError, match=r"Engine.*by rules of its own.*StochasticRounding"):
        make()
