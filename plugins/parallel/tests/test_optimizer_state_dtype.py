"""Test that float32 moments of bfloat16 weights survive a resume where ranks divide the optimizer's state."""

import pytest
import torch
from ddp_models import SaveAt
from stochastic_rounding import fit, local, resume

from torchhal import Callback
from torchhal.checkpoint._consolidate import consolidate
from torchhal_parallel.checkpoint.dcp import DCPCheckpointIO


@pytest.mark.parametrize("io", ["torch", "dcp"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_resume_equals_uninterrupted_run(world2, tmp_path, strategy, optimizer, io):
    answers = world2.run(resume, str(tmp_path), optimizer, strategy, [io], timeout=60)
    for differ, runs, dtypes, weights in answers:
        assert differ == [] and runs == 3
        assert dtypes == {torch.float32} and weights == {torch.bfloat16}


def save(folder, strategy, io):
    trainer, _, _ = fit("AdamW", strategy, [SaveAt(folder, [4])], plugins=[io])
    trainer.strategy.barrier()


class Compare(Callback):
    """The optimizer's state as a resumed fit begins, against that in a file; this rank's share of each tensor."""

    def __init__(self, path):
        self.states = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        self.equal = []

    def on_train_start(self, trainer, module):
        optimizer = trainer.optimizers[0]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            for name in ("exp_avg", "exp_avg_sq"):
                if parameter in optimizer.state:
                    value, saved = local(optimizer.state[parameter][name]), self.states[index][name]
                    rank, size = trainer.global_rank, trainer.world_size
                    share = -(-len(saved) // size)
                    part = saved if value.shape == saved.shape else saved[share * rank :][:share]
                    self.equal.append(value.dtype is torch.float32 and torch.equal(value, part))


def resume_elsewhere(path, strategy):
    compare = Compare(path)
    trainer, _, _ = fit("AdamW", strategy, [compare], ckpt_path=path)
    return compare.equal, trainer.world_size


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_consolidated_state_is_continued_elsewhere(world2, world4, tmp_path, strategy):
    """A sharded save in one file, on one process and on more: with the digits that float32 has."""
    world2.run(save, str(tmp_path), strategy, "dcp", timeout=60)
    path = str(tmp_path / "one.ckpt")
    consolidate(DCPCheckpointIO(), str(tmp_path / "batch4.ckpt"), path)
    state = torch.load(path, weights_only=True)
    assert [set(entry["precision"]) for entry in state["ranks"]] == [{"generator"}] * 2
    moments = [entry["exp_avg"] for entry in state["optimizer_states"][0]["state"].values()]
    assert any(not torch.equal(each, each.bfloat16().float()) for each in moments)
    answers = [resume_elsewhere(path, "single_device"), *world4.run(resume_elsewhere, path, "zero2", timeout=60)]
    answers += world4.run(resume_elsewhere, path, "zero1", timeout=60)
    assert [size for _, size in answers] == [1] + [4] * 8
    assert answers[0][0] and all(all(equal) for equal, _ in answers)
