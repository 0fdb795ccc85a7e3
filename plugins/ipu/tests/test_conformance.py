"""The conformance checks on the stub, in a process of their own: whoever wants the stub says so in the environment.

One process drives all IPUs, so there are no worlds of several processes: the stub shows one IPU. The precision
``ipu-16-mixed`` works within compiled steps only, and not by torch's operators, by which the kit checks precisions.
"""

import pytest

CODE = """
import sys, pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *sys.argv[1:]]))
"""
SUITE = """
from torchhal_conformance import conformance_suite

TestIPU = conformance_suite("accelerator", "ipu")
TestStrategy = conformance_suite("strategy", "ipu_strategy", accelerator="ipu")
"""


@pytest.mark.slow
def test_they_conform(python, tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    told = python(CODE, tmp_path / "test_suite.py", POPTORCH_STUB_IPUS="1")
    assert " passed" in told
