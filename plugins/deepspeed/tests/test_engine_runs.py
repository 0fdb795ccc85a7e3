"""A script in two processes, as users run it: nothing is compiled, a rank that fails ends the run, nothing is left."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import engine_training as training
import pytest
from limits import scaled

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchhal import Trainer
from torchhal_deepspeed.strategy import DeepSpeedStrategy


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if "fail" in sys.argv and batch_idx == 2 and torch.distributed.get_rank() == 1:
            raise KeyError("no such thing")
        return torch.nn.functional.mse_loss(self.body(batch[0]), batch[1])

    def configure_optimizers(self):
        return None if "compiled" in sys.argv else torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}} if "compiled" in sys.argv else None
    strategy = DeepSpeedStrategy(stage=3, config=config)
    trainer = Trainer(accelerator="cpu", strategy=strategy, devices=2, max_epochs=2, logger=False)
    trainer.fit(Net(), data)
    trainer.print("steps", trainer.global_step, trainer.checkpoint_callback.best_model_path)
"""


@pytest.fixture
def run(tmp_path):
    """Run the script where there is no compiler, and where an extension that is built would be seen."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "env", "uname"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "LOCAL_", "WORLD"))
    }
    environment |= {"PATH": str(tools), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "HOME": str(tmp_path)}
    environment["PYTHONWARNINGS"] = "ignore"

    def start(*arguments):
        return subprocess.run(
            [sys.executable, "script.py", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    return start


@pytest.mark.slow
def test_a_script_trains_without_a_compiler(run, tmp_path):
    done = run()
    assert done.returncode == 0, done.stderr
    assert "steps 16" in done.stdout
    assert not (tmp_path / "extensions").exists()
    others = [line for line in done.stderr.splitlines() if not line.startswith("torchhal: fit ")]
    assert "deepspeed" not in "".join(others).lower().replace(str(Path.cwd()).lower(), "")
    path = Path(tmp_path, done.stdout.split()[-1])
    assert {entry.name for entry in path.iterdir()} >= {"engine", "latest", "torchhal.ckpt", "zero_to_fp32.py"}


@pytest.mark.slow
def test_what_has_to_be_compiled_says_so(run):
    done = run("compiled")
    assert done.returncode != 0
    assert "ConfigurationError: DeepSpeed has to compile an operator and can't" in done.stderr
    assert "'torch_adam': True" in done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run(run):
    begin = time.monotonic()
    done = run("fail")
    assert done.returncode != 0
    assert "no such thing" in done.stderr and "rank 1" in done.stderr
    assert time.monotonic() - begin < scaled(100)


def test_nothing_is_left_in_a_process(world2):
    before, after, again = zip(*world2.run(training.left_behind, timeout=200), strict=True)
    for rank in range(2):
        assert after[rank] == before[rank]
        assert again[rank][0] == again[rank][1]  # the same model again, from its weights: a run like any other


@pytest.mark.parametrize("broken", [False, True])
def test_an_engine_that_is_collected_in_a_later_run_takes_nothing_from_it(world2, broken):
    assert world2.run(training.collected_later, broken, timeout=200) == [True, True]


@pytest.mark.slow
def test_nothing_of_a_run_is_kept_alive(world2):
    for stage, model, fails in ((1, "Net", False), (3, "Net", True), (3, "Late", False)):
        assert world2.run(training.kept_alive, {"stage": stage}, model, fails, timeout=200) == [[], []]


def test_a_model_that_a_failed_run_left_in_parts_is_refused(world2):
    for said in world2.run(training.fail_then_fit, timeout=200):
        assert "on purpose" in said[0]
        assert "an earlier run that failed has left Failing in parts" in said[1]
        assert said[2] is None  # below stage 3 it is whole
