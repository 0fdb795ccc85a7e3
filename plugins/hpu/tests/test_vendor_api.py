"""The stub has the vendor's names and signatures, and the plugin uses no others."""

import ast
from pathlib import Path

import pytest
from vendor_facts import check, table
from vendor_facts import uses as vendor_uses

PLUGIN = Path(__file__).parents[1]
SOURCES = sorted((PLUGIN / "src" / "torchhal_hpu").glob("*.py"))
KNOWN = table(PLUGIN / "facts")


def test_the_stub_has_the_vendors_signatures(python):
    lazy = set(python("offered.py").split())
    assert {
        "habana_frameworks.torch.core.mark_step", "habana_frameworks.torch.hpu.synchronize",
        "habana_frameworks.torch.hpex.optimizers.FusedAdamW", "torch.distributed.init_process_group",
        "torch.distributed.new_group", "torch.save", "torch.load",
        "habana_frameworks.torch.hpex.normalization.FusedClipNorm.clip_norm",
        "habana_frameworks.torch.distributed.hccl.initialize_distributed_hpu",
    } <= lazy  # fmt: skip
    eager = set(python("offered.py", PT_HPU_LAZY_MODE="0").split())
    assert "habana_frameworks.torch.dynamo.compile_backend.backends.hpu_backend" in eager


def uses(source):
    for node in ast.walk(ast.parse(source)):
        assert ast.unparse(node) not in ("torch.hpu", "torch.ops.hpu"), "by its own name, so that this test sees it"
    return vendor_uses(source, "habana_frameworks", KNOWN)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_plugin_uses_nothing_else(path):
    check(uses(path.read_text()), KNOWN)


def test_what_the_plugin_uses_is_found():
    found = {(module, name) for path in SOURCES for module, name, _ in uses(path.read_text())}
    core, hpex = "habana_frameworks.torch.core", "habana_frameworks.torch.hpex"
    for use in (
        (core, "mark_step"), (core, "is_lazy"), ("habana_frameworks.torch.hpu", "memory_stats"),
        (f"{hpex}.normalization", "FusedClipNorm"), (f"{hpex}.optimizers", "FusedAdamW"),
        (f"{hpex}.experimental.transformer_engine", "fp8_autocast"),
        ("habana_frameworks.torch.distributed.hccl", "initialize_distributed_hpu"),
    ):  # fmt: skip
        assert use in found


@pytest.mark.parametrize(
    "wrong",
    [
        "import habana_frameworks.torch.hpu.hmp",
        "from habana_frameworks.torch.core import hmp",
        "import habana_frameworks.torch.core as htcore\nhtcore.mark_steps()",
        "import habana_frameworks.torch.core as htcore\nhtcore.mark_step(wait=True)",
        "import habana_frameworks.torch.hpu as hpu\nhpu.synchronize('hpu:0')",
        "from habana_frameworks.torch.hpex.normalization import FusedClipNorm\nFusedClipNorm(p, 1, kind=2)",
        "import torch\ntorch.hpu.synchronize()",
    ],
)
def test_another_use_is_found(wrong):
    with pytest.raises(AssertionError):
        check(uses(wrong), KNOWN)
