"""Without torch_xla, beside a wrong one, and without a TPU: the plugin loads and says why it can't be used."""

import json
import os
import subprocess
import sys

import pytest
import torch

from torchhal import Trainer
from torchhal.cluster import LocalEnvironment
from torchhal.errors import AcceleratorUnavailableError, ConfigurationError
from torchhal_xla import _sdk as sdk
from torchhal_xla import accelerator
from torchhal_xla.environment import XLAEnvironment


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.cold_start
def test_a_listing_imports_neither_torch_nor_the_vendor():
    found = json.loads(
        python(
            "import sys, json; from torchhal import registry;"
            "parts = {(e.kind, name) for k in ('accelerator', 'strategy', 'checkpoint_io', 'cluster_environment')"
            " for e in registry.entries(k) for name in e.names if e.distribution == 'torchhal-xla'};"
            "print(json.dumps([sorted(parts), [m for m in ('torch', 'torch_xla', '_XLAC') if m in sys.modules]]))"
        )
    )
    assert found == [
        [
            ["accelerator", "tpu"], ["accelerator", "xla"], ["checkpoint_io", "xla"], ["cluster_environment", "pjrt"],
            ["strategy", "single_tpu"], ["strategy", "single_xla"], ["strategy", "tpu_spawn"], ["strategy", "xla"],
            ["strategy", "xla_fsdp"], ["strategy", "xla_spmd"],
        ],
        [],
    ]  # fmt: skip


def test_asking_starts_no_runtime_and_imports_no_vendor():
    """``accelerator="auto"``, on a machine that has torch_xla and no TPU, too."""
    code = (
        "import sys, torchhal_xla.accelerator as a; from torchhal import Trainer;"
        "a.XLAAccelerator.availability(); a.TPUAccelerator.availability(); a.XLAAccelerator().device_count();"
        "t = Trainer(logger=False); print(type(t.accelerator).__name__, 'torch_xla' in sys.modules)"
    )
    assert python(code).split() == ["CPUAccelerator", "False"]


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "torch_xla is not installed; it needs a torch of its own version: pip install torchhal-xla[vendor]"),
        ("1.13.0", "torch_xla 1.13.0 loads beside torch 1.13 only, and this is torch"),
        (".".join(torch.__version__.split(".")[:2]) + ".7", ""),
    ],
)
def test_the_version_that_is_missing_or_wrong_is_named(installed, reason, tmp_path, monkeypatch):
    """Found by real metadata: a folder such as pip leaves, before everything else on the path."""
    if installed is None and sdk.problem() == "":
        pytest.skip("torch_xla is installed here")
    if installed is not None:
        folder = tmp_path / f"torch_xla-{installed}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_xla\nVersion: {installed}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
    if not reason:  # its own torch, but is it one that this package knows?
        minor = ".".join(torch.__version__.split(".")[:2])
        reason = "" if minor == sdk.SUPPORTED else f"torchhal-xla is written for torch_xla {sdk.SUPPORTED}"
    problem = sdk.problem()
    assert problem.startswith(reason) and bool(problem) == bool(reason)
    if reason:
        with pytest.raises(AcceleratorUnavailableError) as caught:
            Trainer(accelerator="xla")
        assert reason in str(caught.value) and caught.value.alias == "xla"


def pci(folder, *chips):
    for index, (vendor, device) in enumerate(chips):
        (folder / str(index)).mkdir()
        (folder / str(index) / "vendor").write_text(f"{vendor}\n")
        (folder / str(index) / "device").write_text(f"{device}\n")


def test_chips_are_counted_by_their_numbers(tmp_path, monkeypatch):
    pci(tmp_path, ("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x001f"), ("0x8086", "0x0063"))
    monkeypatch.setattr(accelerator, "_PCI", tmp_path)
    assert accelerator.chips() == [1, 1]
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert "PJRT_DEVICE=CPU" in accelerator.TPUAccelerator.availability().reason
    monkeypatch.delenv("PJRT_DEVICE")
    assert accelerator.XLAAccelerator.pjrt_device() == "TPU"


def test_a_machine_without_a_tpu_says_so():
    if accelerator.chips():
        pytest.skip("this machine has a TPU")
    with pytest.raises(AcceleratorUnavailableError, match="no TPU chip is attached to this machine"):
        Trainer(accelerator="tpu")


def test_a_pjrt_device_that_is_not_here_or_empty(tmp_path, monkeypatch):
    if why := sdk.problem():
        pytest.skip(why)
    monkeypatch.setattr(accelerator, "_PCI", tmp_path)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(
        AcceleratorUnavailableError, match="PJRT_DEVICE=TPU asks for a TPU, but no TPU chip is attached"
    ):
        Trainer(accelerator="xla")
    monkeypatch.setenv("PJRT_DEVICE", "")  # torch_xla takes it for a device without a name
    accelerator.XLAAccelerator.load()
    assert os.environ["PJRT_DEVICE"] == "CPU"


# -- where a process stands ----------------------------------------------------------------------------------

SLICE = {"TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2", "TPU_WORKER_ID": "2"}


@pytest.fixture
def variables(monkeypatch):
    for name in (*SLICE, "PJRT_LOCAL_PROCESS_COUNT", "PJRT_LOCAL_PROCESS_RANK", "MASTER_PORT", "TORCHHAL_LAUNCH_ID"):
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_a_slice_of_several_hosts(variables):
    assert not XLAEnvironment.detect()
    variables(**SLICE)
    assert XLAEnvironment.detect()
    environment = XLAEnvironment()
    environment.configure(num_nodes=3, local_world_size=4)
    assert not environment.creates_processes_externally
    assert (environment.world_size(), environment.node_rank(), environment.global_rank()) == (12, 2, 8)
    assert (environment.main_address, environment.main_port) == ("t-0", 29400)
    variables(MASTER_PORT="1234")
    assert environment.main_port == 1234


def test_a_slice_that_is_not_what_was_asked_for(variables):
    variables(**SLICE)
    with pytest.raises(ConfigurationError, match=r"TPU_WORKER_HOSTNAMES names 3 host\(s\), but 2 node\(s\)"):
        XLAEnvironment().configure(num_nodes=2, local_world_size=4)
    variables(TPU_WORKER_ID="7")
    with pytest.raises(ConfigurationError, match="TPU_WORKER_ID must be 0 to 2"):
        XLAEnvironment().configure(num_nodes=3, local_world_size=4)


def test_one_host_of_a_slice_by_itself_is_local(variables):
    """The variables are there for whatever runs on a TPU host, ``ddp`` on its CPU too."""
    variables(**SLICE)
    environment, local = XLAEnvironment(), LocalEnvironment()
    for each in (environment, local):
        each.configure(num_nodes=1, local_world_size=2)
    for name in ("world_size", "global_rank", "local_rank", "node_rank", "local_world_size"):
        assert getattr(environment, name)() == getattr(local, name)()
    assert environment.main_address == local.main_address


def test_inside_torch_xlas_launch(variables):
    variables(**SLICE, PJRT_LOCAL_PROCESS_COUNT="4", PJRT_LOCAL_PROCESS_RANK="1")
    environment = XLAEnvironment()
    assert XLAEnvironment.detect() and environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (12, 9, 1)
    assert (environment.main_address, environment.main_port) == ("t-0", 29400)
    environment.validate_settings(num_devices=4, num_nodes=3)
    with pytest.raises(ConfigurationError, match=r"started 4 process\(es\) on each of 3 host\(s\), but 1 device"):
        environment.validate_settings(num_devices=1, num_nodes=3)
    variables(PJRT_LOCAL_PROCESS_COUNT="1", TPU_WORKER_HOSTNAMES="t-0")
    assert not XLAEnvironment.detect()  # alone: nobody else is there


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (
            {"TPU_WORKER_ID": "1", "PJRT_LOCAL_PROCESS_COUNT": "2"},
            "TPU_WORKER_HOSTNAMES",
        ),
        ({"PJRT_LOCAL_PROCESS_RANK": "1"}, "PJRT_LOCAL_PROCESS_COUNT"),
        ({"PJRT_LOCAL_PROCESS_COUNT": "2", "PJRT_LOCAL_PROCESS_RANK": "2"}, "PJRT_LOCAL_PROCESS_RANK"),
    ],
)
def test_incomplete_variables_of_torch_xla_are_refused(monkeypatch, variables, name):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert XLAEnvironment.detect()
    with pytest.raises(ConfigurationError, match=name):
        XLAEnvironment().validate_settings(num_devices=2, num_nodes=1)


def test_errors_for_too_little_memory():
    xla = accelerator.XLAAccelerator()
    assert xla.is_out_of_memory(RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Attempting to reserve 1.5G"))
    assert not xla.is_out_of_memory(RuntimeError("Bad StatusOr access: INVALID_ARGUMENT: ..."))
