"""Whether IPUs can be used and, if not, why; what is imported when."""

import pickle

import pytest

from torchhal.errors import ConfigurationError
from torchhal.registry import find
from torchhal_ipu import IPUAccelerator, IPUMixedPrecision, IPUStrategy


def test_every_reason_is_told(python):
    python("reasons.py")


@pytest.mark.cold_start
def test_nothing_of_the_vendor_is_imported_at_discovery(python):
    code = (
        "import sys, torchhal_ipu._plugin, torchhal_ipu; from torchhal.registry import plugins, find, entries\n"
        "assert any(record.name == 'ipu' and record.status == 'loaded' for record in plugins())\n"
        "assert not {'torch', 'poptorch'} & set(sys.modules)\n"
        "for kind in ('accelerator', 'strategy', 'precision'):\n"
        "    [entry.load() for entry in entries(kind) if entry.distribution == 'torchhal-ipu']\n"
        "assert 'torch' in sys.modules and 'poptorch' not in sys.modules\n"
        "from torchhal_ipu import IPUStrategy; IPUStrategy(device_iterations=2)\n"
        "assert 'poptorch' not in sys.modules\n"
    )
    python(code)


@pytest.mark.parametrize("cls", [IPUAccelerator, IPUMixedPrecision, IPUStrategy])
def test_instances_pickle(cls):
    assert type(pickle.loads(pickle.dumps(cls()))) is cls


def test_the_strategy_is_found_by_its_name():
    assert find("strategy", "ipu_strategy").load().accelerators == {"ipu"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IPUStrategy(device_iterations=0), "'device_iterations' must be an int of at least 1 (got 0)"),
        (lambda: IPUStrategy(device_iterations=True), "(got True)"),
        (lambda: IPUStrategy(ipus_per_replica=None), "'ipus_per_replica' must be an int of at least 1 (got None)"),
        (lambda: IPUMixedPrecision(0), "'loss_scaling' must be a number above 0, or 'auto' (got 0)"),
    ],
)
def test_a_number_that_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert words in str(caught.value)
