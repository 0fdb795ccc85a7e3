"""What goes wrong on purpose: by environment variables, by ``simulate``, and through a Trainer."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from joining import joined, new_world, on_device
from limits import scaled
from running import Job
from world import rank

from torchhal.errors import AcceleratorUnavailableError
from torchhal_simulator import _config as config
from torchhal_simulator import simulate
from torchhal_simulator._config import CollectiveFault, Loss, Settings
from torchhal_simulator._device_types import FLAVOURS
from torchhal_simulator._distributed import collectives

# -- what the settings mean ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("DEVICES", "two", "a whole number from 0 to 64"),
        ("DEVICES", "65", "a whole number from 0 to 64"),
        ("DEVICES", "-1", "a whole number from 0 to 64"),
        ("MEMORY", "64MB", "a number of bytes, or like '64MiB'"),
        ("MEMORY", "1.5", "a number of bytes"),
        ("MEMORY", "-1", "a number of bytes"),
        ("MEMORY", "99999999999GiB", "a number of bytes"),
        ("POISON", "yes", "0 or 1"),
        ("LOST", "1@0", "a device, and the step from 1 on"),
        ("LOST", "1@", "a device, and the step"),
        ("LOST", "sim:1", "a device, and the step"),
        ("COLLECTIVE", "hangs", "'hang@7', 'fail@7/1' or 'slow=0.5'"),
        ("COLLECTIVE", "hang@0", "at which call from 1 on"),
        ("COLLECTIVE", "fail=3", "what happens"),
        ("COLLECTIVE", "slow=x", "what happens"),
        ("COLLECTIVE", "fail@1/one", "on which rank"),
    ],
)
def test_nonsense_is_named_with_what_is_expected(variable, text, expected):
    with pytest.raises(ValueError) as caught:
        config.from_environment({f"TORCHHAL_SIM_{variable}": text})
    assert str(caught.value).startswith(f"TORCHHAL_SIM_{variable} must be ")
    assert expected in str(caught.value)
    assert f"(got {text!r})" in str(caught.value)


def test_a_misspelt_variable_is_an_error():
    with pytest.raises(ValueError, match=r"TORCHHAL_SIM_DEVICE is no setting.*TORCHHAL_SIM_DEVICES"):
        config.from_environment({"TORCHHAL_SIM_DEVICE": "4"})


def test_a_loss_that_could_never_happen_is_an_error():
    with pytest.raises(
        ValueError, match=r"TORCHHAL_SIM_LOST names device 2, but TORCHHAL_SIM_DEVICES gives .* 2 device"
    ):
        config.from_environment({"TORCHHAL_SIM_LOST": "2@3"})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Settings()),
        ({"DEVICES": " ", "CACHE": "/x"}, Settings()),
        ({"DEVICES": "0"}, Settings(devices=0)),
        ({"MEMORY": "4096"}, Settings(memory=4096)),
        ({"MEMORY": "1.5 kib", "POISON": "1"}, Settings(memory=1536, poison=True)),
        ({"LOST": "1"}, Settings(lost=Loss(1, 0))),
        ({"LOST": "5@3", "DEVICES": "8"}, Settings(devices=8, lost=Loss(5, 3))),
        ({"COLLECTIVE": "hang@7"}, Settings(collective=CollectiveFault("hang", 7))),
        ({"COLLECTIVE": "fail@7/1"}, Settings(collective=CollectiveFault("fail", 7, 1))),
        ({"COLLECTIVE": "slow/0"}, Settings(collective=CollectiveFault("slow", 0, 0, 1.0))),
        ({"COLLECTIVE": "slow=0.5@2"}, Settings(collective=CollectiveFault("slow", 2, None, 0.5))),
    ],
)
def test_what_variables_mean(variables, expected):
    assert config.from_environment({f"TORCHHAL_SIM_{name}": text for name, text in variables.items()}) == expected


def test_simulate_changes_all_or_nothing(monkeypatch):
    monkeypatch.setenv("TORCHHAL_SIM_MEMORY", "1GiB")
    monkeypatch.delenv("TORCHHAL_SIM_DEVICES", raising=False)
    before = dict(os.environ)
    with pytest.raises(ValueError, match="TORCHHAL_SIM_POISON must be 0 or 1"), simulate(devices=4, poison=3):
        pass
    words = r"'device' is no setting.*devices, memory, poison, lost, collective"
    with pytest.raises(TypeError, match=words), simulate(device=4):
        pass
    assert dict(os.environ) == before
    with pytest.raises(KeyError), simulate(devices=4, poison=True):
        with simulate(memory=512, collective="fail@1"):
            inside = config.from_environment()
            assert inside == Settings(4, 512, True, None, CollectiveFault("fail", 1))
        assert config.from_environment() == Settings(devices=4, memory=2**30, poison=True)
        raise KeyError
    assert dict(os.environ) == before


# -- in a process whose environment says it -------------------------------------------------------------------


def python(code, flavour, **variables):
    """Run ``code`` after ``flavour`` is loaded, with these settings; its output, stripped."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(config.PREFIX)}
    environ.update({config.PREFIX + name.upper(): text for name, text in variables.items()})
    first = (
        "import sys, torch, torch.distributed as dist, torchhal_simulator\n"
        f"flavour, backend = {flavour!r}, {FLAVOURS[flavour].backend!r}\nmodule = torchhal_simulator.load(flavour)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", first + code], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_sets_all(flavour):
    code = """
print(module.device_count(), module.mem_get_info()[1], torch.empty(3, device=flavour).isnan().all().item())
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
for call in (1, 2, 3):
    try:
        dist.barrier()
    except dist.DistBackendError as error:
        print(call, error)
parameter = torch.zeros(2, device=flavour, requires_grad=True)
optimizer = torch.optim.SGD([parameter], lr=1.0)
try:
    for step in (1, 2, 3):
        parameter.sum().backward()
        optimizer.step()
except RuntimeError as error:
    print(step, error)
dist.destroy_process_group()
"""
    out = python(code, flavour, devices="3", memory="1MiB", poison="1", lost="0@2", collective="fail@2")
    lines = out.splitlines()
    assert lines[0] == f"3 {2**20} True"
    assert lines[1] == "2 simulated failure of collective 2 (BARRIER) on rank 0"
    assert lines[2].startswith(f"2 {flavour} error: device 0 was lost")


def test_no_hardware(flavour):
    code = """
print(module.is_available(), module.device_count(), torch.accelerator.is_available())
try:
    torch.ones(1, device=flavour)
except RuntimeError as error:
    print(error)
if flavour == "sim":
    from torchhal_simulator.accelerator import SimAccelerator
    print(SimAccelerator.availability())
"""
    lines = python(code, flavour, devices="0").splitlines()
    assert lines[0] == "False 0 False"
    assert "has 0 device(s)" in lines[1]
    if flavour == "sim":
        assert "torch reports no usable sim device on this machine" in lines[2]


def test_nonsense_is_said_when_the_device_is_loaded():
    with pytest.raises(AssertionError, match="ValueError: TORCHHAL_SIM_POISON must be 0 or 1"):
        python("", "sim", poison="2")


def test_a_hang_leaves_signals_their_default_action(flavour):
    code = f"""
import torch, torch.distributed as dist, torchhal_simulator
torchhal_simulator.load({flavour!r})
dist.init_process_group({FLAVOURS[flavour].backend!r}, store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1, device={flavour!r})
print("calling", flush=True)
dist.all_reduce(tensor)
"""
    environ = {**os.environ, "TORCHHAL_SIM_COLLECTIVE": "hang@1"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "calling\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            process.terminate()
            assert process.wait(5) == -signal.SIGTERM
        finally:
            process.kill()


# -- in two ranks ---------------------------------------------------------------------------------------------

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__)
def test_on_two_ranks(world, flavour, function):
    world.run(function, flavour, timeout=90)


@check
def no_device(flavour):
    device = joined(flavour)
    module = torch.get_device_module(flavour)
    with simulate(devices=0):
        assert not module.is_available()
        assert module.device_count() == 0
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device=device)
        if flavour == "sim":
            from torchhal import Trainer
            from torchhal_simulator.accelerator import SimAccelerator

            availability = SimAccelerator.availability()
            assert not availability
            assert "no usable sim device" in availability.reason
            with pytest.raises(AcceleratorUnavailableError, match=r"'sim' can't be used here: .*no usable sim device"):
                Trainer(accelerator="sim")
    assert module.is_available()
    torch.ones(1, device=device)


@check
def out_of_memory(flavour):
    device = on_device(flavour)
    module = torch.get_device_module(flavour)
    before = module.mem_get_info(device)[1]
    kept = torch.arange(1000.0, device=device)
    used = module.memory_allocated(device)
    with simulate(memory=used + 3 * 2**20):
        large = torch.ones(2**18, device=device)  # 1 MiB
        for allocate in (
            lambda: torch.empty(2**20, device=device),
            lambda: torch.ones(2**20).to(device),
            lambda: torch.cat([kept[:1].expand(2**18)] * 4),
            lambda: kept[:1].expand(2**20) + 1,
        ):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                allocate()
            message = str(caught.value)
            assert message.startswith(f"{flavour} out of memory. Tried to allocate 4.00 MiB."), message
            assert f"device {device.index or 0} has a total capacity of 3.0" in message, message
        assert module.memory_stats(device)["num_ooms"] >= 4
        assert (large + kept[:1]).sum().item() == 2**18
        assert module.memory_allocated(device) == used + 2**20
        del large
        torch.ones(2**19, device=device)
    assert module.mem_get_info(device)[1] == before
    torch.ones(2**20, device=device)
    assert kept.sum().item() == 499500


@check
def lost_at_a_step(flavour):
    """Device 1 is rank 1's; rank 0 goes on."""
    device = on_device(flavour)
    module = torch.get_device_module(flavour)
    kept = torch.ones(4, device=device)
    parameter = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    host = torch.zeros(4)

    def step():
        optimizer.zero_grad()
        (parameter * kept).sum().backward()
        optimizer.step()

    with simulate(lost="1@3"):
        step()
        step()
        if rank() == 0:
            step()
            assert parameter.sum().item() == -12
        else:
            with pytest.raises(RuntimeError, match=f"{flavour} error: device {device.index or 0} was lost"):
                step()
            for use in (
                lambda: kept + 1,
                lambda: kept.add_(1),
                lambda: kept.sum().item(),
                kept[0].item,
                kept.cpu,
                lambda: kept.copy_(host),
                lambda: host.copy_(kept),
                kept.clone,
                lambda: torch.ones(1, device=device),
                lambda: torch.empty(1, device=device),
                lambda: host.to(device),
                lambda: torch.randn(2, device=device),
                module.synchronize,
                lambda: module.current_stream().synchronize(),
                lambda: module.Event().record(),
                lambda: torch.nn.functional.conv1d(kept.view(1, 1, 4), kept.view(1, 1, 4)),
                step,
            ):
                with pytest.raises(RuntimeError, match="was lost"):
                    use()
            if flavour == "sim":
                assert torch.ones(1, device="sim:0").item() == 1
            assert kept.shape == (4,)  # what the host knows
    assert kept.sum().item() == 4
    step()
    with simulate(lost=1):  # at once
        if rank() == 1:
            with pytest.raises(RuntimeError, match="was lost"):
                step()
        else:
            step()
    step()


@check
def nested(flavour):
    """What an inner ``simulate`` doesn't name goes on as it was."""
    device = joined(flavour)
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    mine = 1 if flavour == "sim" else rank()  # the device of LOCAL_RANK, where a process has one

    def use():
        if flavour == "sim":
            return torch.ones(1, device="sim:1")
        return torch.ones(1, device=device)

    with simulate(lost=f"{mine}@3"):
        optimizer.step()
        with simulate(memory="1GiB"):
            optimizer.step()
            use()
        use()
        with pytest.raises(KeyError), simulate(poison=True):
            optimizer.step()
            with pytest.raises(RuntimeError, match="was lost"):
                use()
            raise KeyError
        with pytest.raises(RuntimeError, match="was lost"):
            use()
        with simulate(memory="1GiB"), pytest.raises(RuntimeError, match="was lost"):
            use()
    use()
    with simulate(memory="1GiB"):
        with simulate(lost=mine), pytest.raises(RuntimeError, match="was lost"):
            use()
        use()
        assert torch.get_device_module(flavour).mem_get_info(device)[1] == 2**30
    with simulate(collective="fail@3"):
        dist.barrier()
        with simulate(memory="1GiB"):
            dist.barrier()
            assert collectives(flavour) == 2
        with simulate(poison=True), pytest.raises(dist.DistBackendError, match="collective 3"):
            dist.barrier()
    dist.barrier()


@check
def an_optimizer_in_an_optimizer(flavour):
    """ZeroRedundancyOptimizer's step is one, its inner optimizer's no other; one that fails was one, too."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    device = joined(flavour)
    model = torch.nn.Linear(2, 2).to(device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    own = rank()  # "sim:RANK", or the one device of an HPU process

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError

    def step():
        model(torch.ones(1, 2, device=device)).sum().backward()
        optimizer.step()

    with simulate(lost=f"{own}@4"):
        step()
        with pytest.raises(KeyError):
            Fails(model.parameters(), lr=0.1).step()
        step()
        with pytest.raises(RuntimeError, match="was lost"):
            step()
    dist.barrier()


@check
def lost_between_issue_and_wait(flavour):
    device = joined(flavour)
    tensor = torch.ones(2, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    with simulate(lost=1):
        if rank() == 1:
            with pytest.raises(RuntimeError, match="was lost"):
                work.wait()
            with pytest.raises(RuntimeError, match="was lost"):
                dist.all_reduce(tensor)
        else:
            work.wait()
            assert tensor.tolist() == [2, 2]
    dist.barrier()


@check
def slow(flavour):
    device = joined(flavour)
    tensor = torch.ones(2, device=device)
    plain = dist.new_group(backend="gloo")
    dist.all_reduce(tensor)
    with simulate(collective="slow=2@2/1"):
        dist.all_reduce(tensor)
        start = time.monotonic()
        work = dist.all_reduce(tensor, async_op=True)
        if rank() == 1:
            time.sleep(0.3)
            assert not work.is_completed()
        work.wait()
        took = torch.tensor([0.0, 0.0])
        took[rank()] = time.monotonic() - start
        dist.all_reduce(took, group=plain)
        assert took[1] - took[0] > 1
        dist.all_reduce(tensor)
        assert collectives(flavour) == 3
    assert tensor.tolist() == [16, 16]
    with simulate(collective="slow=2"):  # each, on both
        start = time.monotonic()
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        assert not future.done()  # asking does not wait
        future.wait()
        dist.barrier()
        assert time.monotonic() - start > 3.95
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group)
    with simulate(collective="slow=30"):
        for collect in (lambda work: work.wait(), lambda work: work.get_future().wait()):
            work = dist.all_reduce(tensor, group=group, async_op=True)
            with pytest.raises(dist.DistBackendError, match=r"Timed out waiting 1000ms .*slow"):
                collect(work)
    dist.destroy_process_group(group)


@check
def fail(flavour):
    device = joined(flavour)
    group = dist.new_group(timeout=timedelta(seconds=2))
    tensor = torch.ones(2, device=device)
    with simulate(collective="fail@2/1"):
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if rank() == 1:
            words = r"simulated failure of collective 2 \(ALLREDUCE\) on rank 1"
            with pytest.raises(dist.DistBackendError, match=words):
                work.wait()
            with pytest.raises(RuntimeError, match=words):
                work.get_future().wait()
            assert work.is_completed()
        else:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):  # rank 1 took no part
                work.wait()
        assert tensor.tolist() == [2, 2]
    dist.barrier()
    dist.destroy_process_group(group)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4, 4]


@check
def hang(flavour):
    """Blocks in wait() with Python's other threads running, past every timeout, until the group is aborted."""
    on_device(flavour)
    new_world(FLAVOURS[flavour].backend, timeout=1.0)
    device = joined(flavour)
    tensor = torch.ones(2, device=device)
    dist.all_reduce(tensor)
    ended = {}

    def collect(name, work):
        try:
            (work.wait if name == "wait" else work.get_future().wait)()
        except RuntimeError as error:
            ended[name] = str(error)

    with simulate(collective="hang@1/1"):
        work = dist.all_reduce(tensor, async_op=True)
        if rank() == 1:
            threads = [threading.Thread(target=collect, args=(name, work), daemon=True) for name in ("wait", "future")]
            for thread in threads:
                thread.start()
            time.sleep(2.5)
            assert all(thread.is_alive() for thread in threads)
            assert not work.is_completed()
            dist.distributed_c10d._abort_process_group()
            for thread in threads:
                thread.join(5)
            assert sorted(ended) == ["future", "wait"]
            assert all("aborted" in message for message in ended.values()), ended
        else:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                work.wait()
            dist.destroy_process_group()
    joined(flavour)  # a new world works
    dist.barrier()


CHILD = """
import sys, torch, torchhal_simulator
from torchhal_simulator import _config as settings
module = torchhal_simulator.load(sys.argv[1])
print(settings.current().collective, module.device_count(), module.mem_get_info()[1])
"""


@check
def settings_reach_processes(flavour):
    on_device(flavour)
    with simulate(devices=5, memory="3MiB", collective="hang@4/1"):
        out = subprocess.run(
            [sys.executable, "-c", CHILD, flavour], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    assert out.split(")")[0] + ")" == "CollectiveFault(kind='hang', call=4, rank=1, seconds=1.0)"
    assert out.split()[-2:] == ["5", str(3 * 2**20)]


# -- through a Trainer ----------------------------------------------------------------------------------------

SCRIPT = str(Path(__file__).parent / "scripts" / "train_on.py")
TIMEOUT = 10.0  # of a collective; a busy machine's processes must find each other within it
LONG = 600
GONE_WITHIN = scaled(60)
"""Seconds from a fault, and the timeout of the collective where one waits for it, until every process is gone."""


JOBS = {
    "ok": ("", {}),
    "hang": ("hang@1/1", {}),
    "fail": ("fail@1/1", {}),
    "lost": ("", {"TORCHHAL_SIM_LOST": "1@3"}),
    "fail at start": ("", {"TORCHHAL_SIM_COLLECTIVE": "fail@2/1"}),
}


@pytest.fixture
def run(tmp_path, flavour):
    """Run one of :data:`JOBS` to its end."""

    def to_its_end(name):
        collective, variables = JOBS[name]
        timeout = TIMEOUT if collective.startswith("hang") else LONG
        job = Job(sys.executable, SCRIPT, flavour, tmp_path, timeout, collective, **variables).finish(timeout=120)
        step3 = tmp_path / "step3"
        job.after_fault = time.time() - float(step3.read_text()) if step3.exists() else None
        job.devices = sorted(path.read_text() for path in tmp_path.glob("rank*"))
        return job

    return to_its_end


def test_a_job_without_faults(run, flavour):
    job = run("ok")
    assert job.code == 0, job.err
    assert job.out.count("done after 6 steps") == 2
    assert job.devices == (["sim:0", "sim:1"] if flavour == "sim" else ["hpu:0", "hpu:0"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang", "rank 1 did not take part"),
        ("fail", "simulated failure of collective 1 (ALLREDUCE) on rank 1"),
        ("lost", "was lost"),
        ("fail at start", "simulated failure of collective 2"),
    ],
)
def test_a_faulty_job_ends_and_names_the_rank(run, fault, words):
    job = run(fault)
    assert job.code == 1, job.err
    assert not job.left
    first = job.err[job.err.index("torchhal: rank") :]
    assert first.startswith("torchhal: rank 0 failed" if fault == "hang" else "torchhal: rank 1 failed"), job.err
    assert words in job.err
    if fault == "fail at start":
        assert job.seconds < GONE_WITHIN
    else:
        assert job.after_fault < GONE_WITHIN + (TIMEOUT if fault == "hang" else 0), job.err
