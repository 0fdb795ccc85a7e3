"""What can be said without the hardware: availability with its reason, parsing, what "auto" makes of it."""

import pickle
import subprocess
import sys
import types

import pytest
import torch

from torchhal import Trainer
from torchhal.errors import AcceleratorUnavailableError, ConfigurationError, UnsupportedCombinationError
from torchhal.plugin import Availability
from torchhal.registry import aliases, find
from torchhal.resolve import Request, resolve
from torchhal_gpu import _nvml as nvml
from torchhal_gpu._stream_transfer import SideStreamAccelerator
from torchhal_gpu.cuda import VISIBLE_DEVICES, GPUAccelerator
from torchhal_gpu.mps import MPSAccelerator
from torchhal_gpu.tf32 import TF32Precision
from torchhal_gpu.xpu import XPUAccelerator

ALL = (GPUAccelerator, XPUAccelerator, MPSAccelerator)


@pytest.mark.parametrize("alias", ["gpu", "cuda", "CUDA"])
def test_both_names_are_one(alias):
    assert find("accelerator", alias).load() is GPUAccelerator


@pytest.mark.parametrize("cls", ALL)
def test_unavailable_says_why(cls):
    available = cls.availability()
    if available:
        pytest.skip(f"environment: this machine has {cls.name}")
    assert available.reason and cls().device_count() == 0 and cls().parse_devices("auto") == ()
    with pytest.raises(AcceleratorUnavailableError) as caught:
        Trainer(accelerator=cls.name, max_epochs=1)
    assert repr(cls.name) in str(caught.value) and available.reason in str(caught.value)


def test_auto_misses_one_of_them_and_not_each():
    if any(cls.availability() for cls in ALL):
        pytest.skip("environment: this machine has one of them")
    (note,) = resolve(Request()).notes
    assert "gpu: " in note and "mps" not in note and "xpu" not in note


def test_a_build_without_cuda_is_named():
    if torch.version.cuda or torch.version.hip:
        pytest.skip("environment: this torch has CUDA or ROCm")
    assert torch.__version__ in GPUAccelerator.availability().reason


def test_hidden_devices_are_named(monkeypatch):
    """As on a machine with a driver, of which the variable leaves nothing."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''" in GPUAccelerator.availability().reason
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "driver" in GPUAccelerator.availability().reason or "NVML" in GPUAccelerator.availability().reason


class Driver:
    """pynvml's functions that are used here, over a machine with two GPUs of which torch sees the second."""

    USED = {"GPU-aaaa": (1, 10), "GPU-bbbb": (2 << 30, 80 << 30)}

    class NVMLError(Exception):
        pass

    def __init__(self, problem=""):
        self.problem = problem

    def nvmlInit(self):
        if self.problem:
            raise self.NVMLError(self.problem)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self.USED[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=handle[0], total=handle[1], free=handle[1] - handle[0])


@pytest.fixture
def driver(monkeypatch):
    def install(problem=""):
        monkeypatch.setitem(sys.modules, "pynvml", Driver(problem))
        nvml._library.cache_clear()

    yield install
    nvml._library.cache_clear()


def test_memory_of_all_processes_is_nvmls_of_that_very_device(driver, monkeypatch):
    """By its UUID: NVML counts devices that CUDA_VISIBLE_DEVICES hides, so the index of torch is another's there."""
    driver()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="bbbb"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 7))
    monkeypatch.setattr(SideStreamAccelerator, "memory_stats", lambda self, device: {"allocated": 3})
    device = torch.device("cuda", 0)
    assert GPUAccelerator().memory_stats(device) == {"allocated": 3, "limit": 80 << 30, "used": 2 << 30}
    driver("Driver/library version mismatch")
    assert GPUAccelerator().memory_stats(device) == {"allocated": 3, "limit": 7, "used": 2}, "the runtime's own then"


def test_what_nvml_says_of_a_broken_driver_is_the_reason(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in VISIBLE_DEVICES:
        monkeypatch.delenv(name, raising=False)
    driver("Driver/library version mismatch")
    assert "NVML says 'Driver/library version mismatch'" in GPUAccelerator.availability().reason


def test_devices_are_parsed_in_their_order(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpu = GPUAccelerator()
    assert gpu.parse_devices("auto") == gpu.parse_devices(-1) == (0, 1, 2, 3)
    assert gpu.get_parallel_devices(gpu.parse_devices("3,1")) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    with pytest.raises(ConfigurationError, match=r"index 4 of accelerator 'gpu'.*sees 4, indices 0 to 3"):
        gpu.parse_devices([4])
    with pytest.raises(ConfigurationError, match="at most 4"):
        gpu.parse_devices(5)


def test_a_mac_has_no_process_groups(monkeypatch):
    """gloo carries no tensor of its GPU, and no other backend is there: said before a process starts."""
    monkeypatch.setattr(MPSAccelerator, "availability", classmethod(lambda cls: Availability(True)))
    monkeypatch.setattr(MPSAccelerator, "device_count", lambda self: 1)
    for alias in [alias for alias in aliases("strategy") if alias.startswith("ddp")]:
        with pytest.raises(UnsupportedCombinationError, match=r"joins its.*no backend.*'mps'.*'single_device'"):
            resolve(Request(accelerator="mps", strategy=alias))
    assert resolve(Request(accelerator="mps")).strategy.alias == "single_device"


@pytest.mark.parametrize("cls", [*ALL, TF32Precision])
def test_instances_pickle(cls):
    assert type(pickle.loads(pickle.dumps(cls()))) is cls


@pytest.mark.cold_start
def test_nothing_of_a_vendor_is_imported_by_a_probe():
    code = (
        "import sys, torchhal_gpu._plugin; assert 'torch' not in sys.modules\n"
        "from torchhal_gpu import cuda, xpu, mps\n"
        "for cls in (cuda.GPUAccelerator, xpu.XPUAccelerator, mps.MPSAccelerator): cls.availability()\n"
        "import torch; assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()\n"
        "assert not torch.cuda._is_in_bad_fork()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tf32_on_a_torch_without_a_switch_for_each_operator(monkeypatch):
    """Before torch 2.9."""
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn := types.SimpleNamespace(allow_tf32=False))
    before, precision = torch.get_float32_matmul_precision(), TF32Precision()
    for _ in range(2):
        precision.setup(GPUAccelerator(), torch.device("cuda", 0))
        assert (cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (True, "high")
    for _ in range(2):
        precision.teardown()
        assert (cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (False, before)


def test_tf32_is_for_the_gpu(tmp_path):
    with pytest.raises(UnsupportedCombinationError, match=r"tf32.*cpu"):
        Trainer(accelerator="cpu", precision="tf32", max_epochs=1, default_root_dir=tmp_path)


def test_tf32_needs_ampere():
    if torch.cuda.is_tf32_supported():
        pytest.skip("environment: this GPU has TensorFloat-32")
    with pytest.raises(UnsupportedCombinationError, match=r"8\.0 or newer; use '32-true'"):
        TF32Precision().setup(GPUAccelerator(), torch.device("cuda", 0))


@pytest.mark.parametrize("own_switch", [False, True])
def test_tf32_puts_the_switches_back(own_switch):
    """In a process of its own: torch doesn't forget which of its two interfaces was used."""
    code = f"""
import torch
from torchhal_gpu import _nvml as nvml
from torchhal_gpu._stream_transfer import SideStreamAccelerator
from torchhal_gpu.cuda import VISIBLE_DEVICES, GPUAccelerator
from torchhal_gpu.tf32 import TF32Precision

torch.cuda.is_tf32_supported = lambda: True
backends = torch.backends
backends.cudnn.conv.fp32_precision = "ieee"
if {own_switch}:
    backends.cuda.matmul.fp32_precision = "ieee"

def switches():
    each = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    return [switch.fp32_precision.replace("none", "ieee") for switch in each]

before, precision = switches(), TF32Precision()
for _ in range(2):
    precision.setup(GPUAccelerator(), torch.device("cuda", 0))
    assert switches() == ["tf32"] * 3
if not {own_switch}:
    assert torch.get_float32_matmul_precision() == "high"  # what libraries ask
for _ in range(2):
    precision.teardown()
    assert switches() == before, (switches(), before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("accelerator", "message", "expected"),
    [
        (GPUAccelerator, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        (GPUAccelerator, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ...", True),
        (GPUAccelerator, "CUDA error: an illegal memory access was encountered", False),
        (MPSAccelerator, "Invalid buffer size: 89.06 GiB", True),
        (XPUAccelerator, "Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", True),
    ],
)
def test_errors_for_too_little_memory(accelerator, message, expected):
    assert accelerator().is_out_of_memory(RuntimeError(message)) is expected
    assert not accelerator().is_out_of_memory(ValueError(message))
