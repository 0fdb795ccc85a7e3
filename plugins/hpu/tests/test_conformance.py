"""The conformance checks on the stub, in processes of their own: whoever wants the stub says so in the environment."""

from pathlib import Path

import pytest

CODE = """
import sys, pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *sys.argv[1:]]))
"""
SUITES = {
    "parts": """
from torchhal_conformance import conformance_suite

TestHPU = conformance_suite("accelerator", "hpu")
TestFile = conformance_suite("checkpoint_io", "hpu")
TestBF16 = conformance_suite("precision", "bf16-mixed", accelerator="hpu")
TestFP8 = conformance_suite("precision", "hpu-fp8", accelerator="hpu")
""",
    "strategies": """
from torchhal_conformance import conformance_suite

TestSingle = conformance_suite("strategy", "hpu_single", accelerator="hpu")
TestParallel = conformance_suite("strategy", "hpu_parallel", accelerator="hpu")
""",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SUITES)
def test_they_conform(python, tmp_path, name):
    (tmp_path / f"test_{name}.py").write_text(SUITES[name])
    engine = Path(__file__).parent / "engine"
    python(CODE, tmp_path / f"test_{name}.py", timeout=380, PYTHONPATH=str(engine))
