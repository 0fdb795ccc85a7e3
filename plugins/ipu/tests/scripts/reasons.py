"""Why the accelerator can't be used: each case in a fork of this process, which has imported torch and the plugin, and
nothing of the vendor's."""

import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from torchhal.errors import AcceleratorUnavailableError, ConfigurationError, UnsupportedCombinationError
from torchhal.resolve import Request, resolve
from torchhal_ipu.accelerator import IPUAccelerator

FOLDER = Path(tempfile.mkdtemp())


def vendor(body):
    """As if the vendor's package were installed, whose import does this."""
    package = Path(tempfile.mkdtemp(dir=FOLDER)) / "poptorch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body)
    sys.path.insert(0, str(package.parent))


def installed(version):
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    info = folder / f"poptorch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: poptorch\nVersion: {version}\n")
    sys.path.insert(0, str(folder))


def missing():
    vendor("raise ModuleNotFoundError(\"No module named 'poptorch'\", name='poptorch')")
    return "poptorch is not installed", "Poplar SDK"


def too_old():
    installed("3.0.0+86945_163b7ce462")
    return ("needs poptorch >=3.3 (found poptorch 3.0.0+86945",)


def another_torch():
    vendor("assert False, 'This version of PopTorch only works with torch==2.0.1 but the version installed is 2.13.0'")
    return f"refuses torch {torch.__version__}", "only works with torch==2.0.1", "Build it for this torch"


def sdk_not_enabled():
    vendor("raise ImportError('Unable to import PopTorch: source /path/to/poplar-sdk/enable')")
    return ("source /path/to/poplar-sdk/enable",)


def exits():
    vendor("import sys; sys.exit('driver not loaded')")
    return ("SystemExit: driver not loaded",)


def broken_library():
    vendor("raise OSError('libpoplar.so: cannot open shared object file')")
    return ("OSError: libpoplar.so",)


def stub_unasked():
    del os.environ["POPTORCH_STUB"]
    return "poptorch-stub 3.3.0+stub, which computes on the CPU", "set POPTORCH_STUB=1"


def stub_beside_the_real_one():
    installed("3.3.0")
    return ("poptorch-stub and poptorch are both installed",)


def no_devices():
    os.environ["POPTORCH_STUB_IPUS"] = "0"
    return "sees no IPU: `gc-info -l`", "POPTORCH_IPU_MODEL=1"


CASES = (
    missing, too_old, another_torch, sdk_not_enabled, exits, broken_library, stub_unasked, stub_beside_the_real_one,
    no_devices,
)  # fmt: skip


def reason():
    availability = IPUAccelerator.availability()
    assert not availability and IPUAccelerator.availability().reason == availability.reason, "the same the second time"
    try:
        resolve(Request(accelerator="ipu"))
    except AcceleratorUnavailableError as error:
        assert availability.reason in str(error), error
    else:
        raise AssertionError("an accelerator that is named must be there")
    assert IPUAccelerator().device_count() == 0
    return availability.reason


def counted():
    os.environ["POPTORCH_STUB_IPUS"] = "6"  # given out in powers of two
    assert IPUAccelerator().parse_devices("auto") == (0, 1, 2, 3) and IPUAccelerator().device_count() == 4
    os.environ.update(POPTORCH_STUB_IPUS="0", POPTORCH_IPU_MODEL="1")
    assert IPUAccelerator.availability() and IPUAccelerator().device_count() == 1


def chosen():
    """What a name means on IPUs, and what doesn't go together."""
    plan = resolve(Request(accelerator="ipu", devices=2, precision="16-mixed"))
    assert (plan.strategy.alias, plan.precision.alias, plan.launcher) == ("ipu_strategy", "ipu-16-mixed", "none")
    assert resolve(Request(accelerator="auto")).accelerator.alias == "ipu"
    for kind, words, given in (
        (UnsupportedCombinationError, "'ddp' is not made for accelerator 'ipu'", {"strategy": "ddp"}),
        (UnsupportedCombinationError, "works on accelerator 'ipu'", {"accelerator": "cpu", "strategy": "ipu_strategy"}),
        (UnsupportedCombinationError, "bf16-mixed", {"precision": "bf16-mixed"}),
        (UnsupportedCombinationError, "one machine from one process", {"num_nodes": 2}),
        (ConfigurationError, "must be a number of IPUs (got [1])", {"devices": [1]}),
    ):
        try:
            resolve(Request(**{"accelerator": "ipu", "devices": 1, **given})).build()
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


def in_fork(case):
    if (child := os.fork()) == 0:
        try:
            words = case()
            told = reason() if words else ""
            assert all(word in told for word in words or ()), told
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    assert "poptorch" not in sys.modules
    failed = [case.__name__ for case in (*CASES, counted, chosen) if not in_fork(case)]
    assert not failed, failed
