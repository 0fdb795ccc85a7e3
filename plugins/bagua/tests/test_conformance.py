"""The conformance checks on the stub, in a process of their own: whoever wants it says so in the environment."""

import pytest

CODE = """
import sys, pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *sys.argv[1:]]))
"""
SUITE = """
from torchhal_conformance import conformance_suite

TestBagua = conformance_suite(
    "strategy", "bagua", accelerator="cpu", features=("groups", "portable", "sync_grads")
)
"""
LOSSY = """
from torchhal_conformance import conformance_suite

PARITY = {"STR-14", "STR-15", "STR-17", "STR-18", "STR-19", "STR-20", "STR-35", "STR-36", "STR-37", "STR-47"}
TestBytes = conformance_suite("strategy", "bagua", only=PARITY, arguments={"algorithm": "bytegrad"})
TestPeers = conformance_suite(
    "strategy", "bagua", only=PARITY, arguments={"algorithm": "low_precision_decentralized", "hierarchical": False}
)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # a whole suite in one test
def test_it_conforms(python, tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    # STR-48: Bagua waits for a rank with fewer batches as long as its own communicators do, five minutes
    told = python(CODE, tmp_path / "test_suite.py", "-k", "not STR-48", timeout=580)
    assert " passed" in told


@pytest.mark.slow
def test_lossy_algorithms_keep_their_tolerances(python, tmp_path):
    (tmp_path / "test_suite.py").write_text(LOSSY)
    told = python(CODE, tmp_path / "test_suite.py")
    assert " passed" in told
