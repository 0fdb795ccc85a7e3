"""Why the accelerator can't be used: each case in a fork of this process, which has imported torch and the plugin, and
nothing of the vendor's."""

import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from torchhal.errors import AcceleratorUnavailableError
from torchhal.resolve import Request, resolve
from torchhal_hpu.accelerator import HPUAccelerator

FOLDER = Path(tempfile.mkdtemp())


def vendor(body):
    """As if the vendor's package were installed, whose import does this."""
    package = Path(tempfile.mkdtemp(dir=FOLDER)) / "habana_frameworks" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body)
    sys.path.insert(0, str(package.parents[1]))


def installed(name, version):
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sys.path.insert(0, str(folder))


def reason():
    availability = HPUAccelerator.availability()
    assert not availability and HPUAccelerator.availability().reason == availability.reason, "the same the second time"
    try:
        resolve(Request(accelerator="hpu"))
    except AcceleratorUnavailableError as error:
        assert availability.reason in str(error), error
    else:
        raise AssertionError("an accelerator that is named must be there")
    assert HPUAccelerator().device_count() == 0
    return availability.reason


def missing():
    vendor("raise ModuleNotFoundError(\"No module named 'habana_frameworks.torch'\", name='habana_frameworks.torch')")
    return "the Gaudi software is not installed", "docs.habana.ai"


def too_old():
    installed("habana-torch-plugin", "1.19.2.32")
    return "needs release 1.20 or newer", "habana-torch-plugin 1.19.2.32 is installed"


def another_torch():
    vendor("assert False, 'Error: Compile-time major/minor PyTorch version 2.5.1 differs from run-time 2.13.0.'")
    return f"refuses torch {torch.__version__}", "version 2.5.1 differs", "Install the torch that came with it"


def stock_torch_in_lazy_mode():
    vendor("assert False, 'Stock PyTorch version 2.13.0 is not supported in Lazy mode.'")
    return "not supported in Lazy mode", "PT_HPU_LAZY_MODE=0"


def stock_torch_without_local_version():
    torch.version.__version__ = "2.13.0"
    vendor("from packaging.version import Version\nVersion('2.13.0').local.startswith('git')")
    return "has no attribute 'startswith'", "Install the torch that came with it", "PT_HPU_LAZY_MODE=0"


def exits():
    vendor("import sys; sys.exit('driver not loaded')")
    return ("SystemExit: driver not loaded",)


def broken_library():
    vendor("raise OSError('libSynapse.so: cannot open shared object file')")
    return ("OSError: libSynapse.so",)


def stub_unasked():
    del os.environ["HABANA_FRAMEWORKS_STUB"]
    return "habana-frameworks-stub 1.19.0+stub, a simulation", "set HABANA_FRAMEWORKS_STUB=1"


def stub_beside_the_real_one():
    installed("habana-torch-plugin", "1.20.0.543")
    return ("habana-frameworks-stub and habana-torch-plugin are both installed",)


def no_devices():
    os.environ["TORCHHAL_SIM_DEVICES"] = "0"
    return ("sees no device: `hl-smi`",)


def torch_was_asked_before():
    assert torch.accelerator.current_accelerator() is None
    return "torch was asked for its accelerator", "in a new process"


def another_accelerator():
    import torchhal_simulator

    torchhal_simulator.load("sim")
    return "torch was asked for its accelerator before the Gaudi software was loaded", "its answer, sim"


CASES = (
    missing, too_old, another_torch, stock_torch_in_lazy_mode, stock_torch_without_local_version, exits,
    broken_library, stub_unasked, stub_beside_the_real_one, no_devices, torch_was_asked_before, another_accelerator,
)  # fmt: skip


def probe_and_fork():
    """A probe starts nothing: a child that is forked after it may use the device."""
    assert HPUAccelerator.availability() and HPUAccelerator().parse_devices("auto") == (0, 1)
    torch.ones(2, device="hpu").sum().item()


if __name__ == "__main__":
    assert "habana_frameworks.torch" not in sys.modules
    failed = []
    for case in (*CASES, probe_and_fork):
        if (child := os.fork()) == 0:
            try:
                words = case()
                told = reason() if words else ""
                assert all(word in told for word in words or ()), told
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            failed.append(case.__name__)
    assert HPUAccelerator.availability()
    if (child := os.fork()) == 0:
        os._exit(int(torch.ones(2, device="hpu").sum().item()) - 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not failed, failed
