"""Whether Gaudi can be used and, if not, why; what is imported when."""

import pickle

import pytest

from torchhal.registry import find
from torchhal_hpu.accelerator import HPUAccelerator
from torchhal_hpu.precision import FP8Precision
from torchhal_hpu.strategy import HPUParallelStrategy, HPUSingleStrategy


@pytest.mark.slow
def test_every_reason_is_told(python):
    python("reasons.py")


@pytest.mark.cold_start
def test_nothing_of_the_vendor_is_imported_at_discovery(python):
    code = (
        "import sys, torchhal_hpu._plugin, torchhal_hpu; from torchhal.registry import plugins, find, entries\n"
        "assert any(record.name == 'hpu' and record.status == 'loaded' for record in plugins())\n"
        "assert not {'torch', 'habana_frameworks.torch'} & set(sys.modules)\n"
        "for kind in ('accelerator', 'strategy', 'precision', 'checkpoint_io'):\n"
        "    [entry.load() for entry in entries(kind) if entry.distribution == 'torchhal-hpu']\n"
        "assert 'torch' in sys.modules and 'habana_frameworks.torch' not in sys.modules\n"
    )
    python(code, PT_HPU_LAZY_MODE="1")


@pytest.mark.slow
@pytest.mark.cold_start
def test_eager_mode_loads_with_torch(python):
    """As the vendor's entry point does; the plugin is then loaded already, and trains."""
    code = (
        "import sys, torch; assert 'habana_frameworks.torch' in sys.modules\n"
        "from torchhal_hpu import HPUAccelerator; assert HPUAccelerator.availability()\n"
    )
    python(code, PT_HPU_LAZY_MODE="0")
    python("import sys, torch; assert 'habana_frameworks.torch' not in sys.modules", PT_HPU_LAZY_MODE="1")
    quiet = {"PT_HPU_LAZY_MODE": "0", "HABANA_FRAMEWORKS_STUB": None}
    python("import sys, torch; assert 'habana_frameworks.torch' not in sys.modules", **quiet)


@pytest.mark.parametrize("cls", [HPUAccelerator, FP8Precision, HPUSingleStrategy, HPUParallelStrategy])
def test_instances_pickle(cls):
    assert type(pickle.loads(pickle.dumps(cls()))) is cls


@pytest.mark.parametrize("alias", ["hpu_single", "hpu_parallel"])
def test_strategies_are_found_by_their_names(alias):
    assert find("strategy", alias).load().accelerators == {"hpu"}


def test_errors_for_too_little_memory():
    error = RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB")
    assert HPUAccelerator().is_out_of_memory(error)
    assert not HPUAccelerator().is_out_of_memory(RuntimeError("Graph compile failed."))
