"""A process per device: the whole path at a world of one, and no way to a world in which torch_xla sends nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from xla_training import Net, assert_close, batches, plain, trainer

from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal_xla import _sdk as sdk
from torchhal_xla.accelerator import XLAAccelerator

if why := sdk.problem():
    pytest.skip(why, allow_module_level=True)  # said once, not for each test

pytestmark = pytest.mark.usefixtures("torch_xla")

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.1)])
def test_a_world_of_one_equals_the_plain_loop(accumulate, clip):
    data = batches(10 * accumulate)
    model, reference = Net(optimizer="sgd", schedule=True), Net(optimizer="sgd", schedule=True)
    run = trainer("tpu_spawn", devices=1, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    run.fit(model, data, data[:2])
    plain(reference, data, accumulate=accumulate, clip=clip)
    assert_close(model, reference)
    assert run.strategy.alias == "xla" and not dist.is_initialized()


def test_the_collectives_of_a_world_of_one():
    class Asks(Net):
        def on_train_start(self):
            strategy, device = self.trainer.strategy, torch.device("xla")
            value = {"t": torch.tensor([1, 2]).to(device), "h": torch.ones(2).half(), "n": 3, "s": "text"}
            found = strategy.reduce(value, "mean")
            assert found["t"].cpu().tolist() == [1.0, 2.0] and found["t"].device.type == "xla"
            assert found["h"].dtype is torch.float16 and (found["n"], found["s"]) == (3.0, "text")
            for op in ("sum", "min", "max", "product"):
                assert strategy.reduce(value["t"], op).cpu().tolist() == [1, 2]
            assert strategy.all_gather(torch.ones(2, 3)).cpu().tolist() == [[[1.0] * 3] * 2]
            weight = torch.ones(2, device=device, requires_grad=True)
            (3 * strategy.all_gather(weight, sync_grads=True)).sum().backward()
            assert weight.grad.cpu().tolist() == [3.0, 3.0]
            assert strategy.broadcast({"a": value["t"]})["a"] is value["t"]
            assert strategy.all_gather_object("x") == ["x"] and strategy.reduce_boolean_decision(True)
            strategy.barrier("here")
            with pytest.raises(ConfigurationError, match="'group' must be None under strategy 'xla'"):
                strategy.reduce(1, group=dist.group.WORLD)
            self.asked = True

    model = Asks()
    trainer("xla", devices=1).fit(model, batches(1))
    assert model.asked


def test_the_first_weights_are_chosen_and_not_multiplied():
    """What another rank had may be NaN; integers, booleans and tensors without elements travel, too."""
    from torchhal_xla.data_parallel import broadcast

    host = [torch.tensor([1.5, float("nan"), float("inf")]), torch.tensor([3, 4]), torch.tensor([True, False]),
            torch.empty(0)]  # fmt: skip
    tensors = [tensor.to("xla") for tensor in host]
    broadcast(tensors, True)
    for tensor, expected in zip(tensors, host, strict=True):
        torch.testing.assert_close(tensor.cpu(), expected, equal_nan=True, rtol=0, atol=0)
    broadcast(tensors, False)  # and nobody is the source: all zeros
    assert [tensor.cpu().tolist() for tensor in tensors] == [[0.0, 0.0, 0.0], [0, 0], [False, False], []]


# -- worlds in which every process would keep its own gradients ----------------------------------------------


def test_several_processes_on_the_cpu_are_refused(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    for options in ({"devices": 2}, {"devices": 1, "num_nodes": 2}):
        with pytest.raises(UnsupportedCombinationError, match="2 processes on accelerator 'xla' with PJRT_DEVICE=CPU"):
            trainer("xla", **options)


@pytest.mark.parametrize("strategy", ["xla", "single_xla", "xla_spmd"])
def test_torchrun_on_the_cpu_is_refused(strategy, monkeypatch):
    values = {
        "TORCHELASTIC_RUN_ID": "job", "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511,
    }  # fmt: skip
    for name, value in {**values, "CPU_NUM_DEVICES": 2 if strategy == "xla_spmd" else 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigurationError) as caught:
        trainer(strategy, devices="auto")
    assert "process" in str(caught.value) and "2" in str(caught.value)


def run_script(name, *, module=(), **environment):
    return subprocess.run(
        [sys.executable, *module, str(SCRIPTS / name)], env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=150, check=False,
    )  # fmt: skip


def test_real_torchrun_ends_with_the_refusal():
    done = run_script("fit_replicas.py", module=("-m", "torch.distributed.run", "--nproc-per-node=2"))
    assert done.returncode != 0
    assert "can't join 2 processes on accelerator 'xla' with PJRT_DEVICE=CPU" in done.stderr


def test_ranks_that_torch_xla_counts_otherwise_end_the_run():
    """Real processes, started past the refusal: each finds itself alone, says so, and none is left behind."""
    done = run_script("past_the_refusal.py", CPU_NUM_DEVICES="1")
    assert done.returncode == 1 and "trained" not in done.stdout
    assert re.search(r"torch_xla counts this process as 0 of \d, its launcher as \d of 2", done.stderr), done.stderr


def test_inside_torch_xlas_own_launch():
    """One device: it trains. Two, as threads, where torch_xla's collectives never return: an error, and an end."""
    done = run_script("inside_launch.py", CPU_NUM_DEVICES="1")
    assert done.returncode == 0 and "trained 4 steps" in done.stdout, done.stderr
    done = run_script("inside_launch.py", CPU_NUM_DEVICES="2")
    assert done.returncode != 0 and "2 replicas as threads of this process" in done.stderr


@pytest.mark.parametrize("method", ["subprocess", "fork", 3])
def test_start_methods_that_take_a_chip_too_early(method):
    from torchhal_xla.data_parallel import XLAStrategy

    with pytest.raises(ConfigurationError, match="'start_method' must be one of 'spawn', 'forkserver'"):
        XLAStrategy(start_method=method)


def test_a_backward_before_the_first_device_is_named():
    """torch's autograd counts devices once; XLA's come too late then, and its own message asks for a bug report."""
    done = run_script("backward_first.py")
    assert done.returncode == 1
    assert (
        "AcceleratorUnavailableError: accelerator 'xla': this process ran a backward before its first XLA device"
        in (done.stderr)
    )


def test_memory_is_counted_where_the_runtime_counts_it():
    assert XLAAccelerator().memory_stats(torch.device("xla")) == {}  # not on the CPU
