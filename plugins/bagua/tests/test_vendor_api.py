"""The stub has Bagua's names and signatures, and the plugin uses no others."""

import importlib
from pathlib import Path

import pytest
from vendor_facts import check, compare, table
from vendor_facts import uses as vendor_uses

PLUGIN = Path(__file__).parents[1]
SOURCES = sorted((PLUGIN / "src" / "torchhal_bagua").glob("*.py"))
KNOWN = table(PLUGIN / "facts")
OBJECTS = {  # what the plugin calls an object of Bagua's -> its class
    "wrapper": ("bagua.torch_api.data_parallel.distributed", "DistributedDataParallel_V1_9_0"),
    "inner": ("bagua.torch_api.data_parallel.bagua_distributed", "BaguaDistributedDataParallel"),
    "algorithm": ("bagua.torch_api.algorithms.async_model_average", "AsyncModelAverageAlgorithmImpl"),
}
TORCHS = {"register_forward_pre_hook"}  # of torch.nn.Module, which the wrapper is


def test_the_stub_has_the_vendors_signatures():
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
    from bagua.torch_api.communication import ReduceOp

    scope = {"GradientAllReduceAlgorithm": GradientAllReduceAlgorithm, "ReduceOp": ReduceOp}
    compared = []
    for name in sorted(KNOWN):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # the stub hasn't got it, nor may the plugin use it
        compared += compare(KNOWN, module, ("bagua",), scope)
    assert len(compared) > 60
    for name in (
        "bagua.torch_api.communication.init_process_group", "bagua.torch_api.communication.broadcast_object",
        "bagua.torch_api.data_parallel.DistributedDataParallel", "bagua.torch_api.algorithms.Algorithm.init",
        "bagua.torch_api.algorithms.q_adam.QAdamOptimizer",
        "bagua.torch_api.algorithms.async_model_average.AsyncModelAverageAlgorithmImpl.abort",
    ):  # fmt: skip
        assert name in compared


def uses(source, *, objects=True):
    return vendor_uses(source, "bagua", KNOWN, objects=OBJECTS if objects else None, others=TORCHS)


# the strategy has an argument, and a record, that are called as the wrapping calls an object of Bagua's
WRAPPING = "_ddp_wrapper.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_plugin_uses_nothing_else(path):
    check(uses(path.read_text(), objects=path.name == WRAPPING), KNOWN)


def test_what_the_plugin_uses_is_found():
    found = {
        (module, name) for path in SOURCES for module, name, _ in uses(path.read_text(), objects=path.name == WRAPPING)
    }
    api = "bagua.torch_api"
    for use in (
        (f"{api}.communication", "init_process_group"), (f"{api}.communication", "is_initialized"),
        (f"{api}.communication", "allreduce_inplace"), (f"{api}.communication", "broadcast_object"),
        (f"{api}.communication", "barrier"), (f"{api}.communication", "ReduceOp"),
        (f"{api}.data_parallel", "DistributedDataParallel"), (f"{api}.algorithms", "Algorithm.init"),
        (f"{api}.algorithms.q_adam", "QAdamOptimizer"),
        (OBJECTS["algorithm"][0], "AsyncModelAverageAlgorithmImpl.abort"),
        (OBJECTS["algorithm"][0], "AsyncModelAverageAlgorithmImpl.status"),
        (OBJECTS["inner"][0], "BaguaDistributedDataParallel._reset_algorithm_state"),
        (OBJECTS["wrapper"][0], "DistributedDataParallel_V1_9_0.no_sync"),
    ):  # fmt: skip
        assert use in found, use


@pytest.mark.parametrize(
    "wrong",
    [
        "import bagua.torch_api.comm",
        "from bagua.torch_api.communication import destroy_process_group",
        "from bagua.torch_api import communication\ncommunication.destroy()",
        "from bagua.torch_api import communication\ncommunication.init_process_group(store, rank=0)",
        "from bagua.torch_api.data_parallel import DistributedDataParallel\nDistributedDataParallel(m, hook=1)",
        "from bagua.torch_api.algorithms import Algorithm\nAlgorithm.create('async')",
        "def f(self):\n    wrapper = self.wrapper\n    wrapper.abort()",
        "def f(self):\n    wrapper.inner.set_step(3)",
        "algorithm.abort(wrapper, 1)",
    ],
)
def test_another_use_is_found(wrong):
    with pytest.raises(AssertionError):
        check(uses(wrong), KNOWN)
