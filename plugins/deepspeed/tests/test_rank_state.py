"""Test that per-rank state is part of the engine's checkpoints, and that the engine refuses dtypes of others."""

import engine_training as training
import pytest
import torch
from ddp_models import SaveAt

from torchhal import Trainer
from torchhal.cli import main
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import SinglePrecision
from torchhal_deepspeed import DeepSpeedStrategy

pytestmark = pytest.mark.timeout(300)


class Counting(DeepSpeedStrategy):
    """Each rank counts in steps of its own."""

    own, loaded = torch.zeros(3), 0

    def optimizer_step(self, optimizer, closure=None):
        self.own = self.own + self.global_rank + 1
        return super().optimizer_step(optimizer, closure)

    def rank_state_dict(self):
        return {"own": self.own}

    def load_rank_state_dict(self, state):
        self.own = state["own"]
        self.loaded += 1


class Remembering(SinglePrecision):
    loaded = None

    def rank_state_dict(self):
        return {"rank": torch.distributed.get_rank()}

    def load_rank_state_dict(self, state):
        self.loaded = state["rank"]


def fit(stage, callbacks=(), ckpt_path=None, plugins=()):
    strategy = Counting(stage=stage)
    trainer = Trainer(
        accelerator="cpu", devices="auto", strategy=strategy, callbacks=list(callbacks), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[Remembering(), *plugins],
    )  # fmt: skip
    trainer.fit(training.Net(), training.loader(trainer), ckpt_path=ckpt_path)
    return strategy


def save(folder, stage, plugins):
    return fit(stage, [SaveAt(folder, [2])], plugins=plugins).own[0].item()


def resume(path, stage, plugins):
    strategy = fit(stage, ckpt_path=path, plugins=plugins)
    return strategy.loaded, strategy.own[0].item(), strategy.precision.loaded


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "plugins"), [(2, []), (3, ["dcp"])])
def test_each_rank_gets_its_own(world2, tmp_path, stage, plugins):
    """Through the engine's own folder, another sharded one, and one file made of either."""
    whole = world2.run(save, str(tmp_path), stage, plugins, timeout=200)
    path, one = str(tmp_path / "batch2.ckpt"), str(tmp_path / "one.ckpt")
    expected = [(1, whole[0], 0), (1, whole[1], 1)]
    assert world2.run(resume, path, stage, plugins, timeout=200) == expected
    assert whole[1] == 2 * whole[0]
    assert main(["checkpoint", "consolidate", path, one]) == 0
    assert world2.run(resume, one, stage, ["torch"], timeout=200) == expected


class Wide(SinglePrecision):
    def optimizer_state_dtype(self, parameter, name):
        return torch.float64


def test_dtypes_of_optimizer_state_are_the_engines():
    with pytest.raises(UnsupportedCombinationError, match=r"Wide.*'deepspeed_stage_2'|'deepspeed_stage_2'.*Wide"):
        Trainer(accelerator="cpu", strategy="deepspeed_stage_2", plugins=[Wide()], logger=False)


def test_state_of_a_precision_is_no_reason_to_refuse():
    """The Trainer saves and restores it, whatever the engine does."""
    Trainer(accelerator="cpu", strategy="deepspeed_stage_2", plugins=[Remembering()], logger=False)
