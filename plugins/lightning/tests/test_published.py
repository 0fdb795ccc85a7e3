"""Models of published libraries train by torchhal's Trainer as by Lightning's, step by step; ``published`` has all."""

import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parent / "published"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(util.find_spec("lightning") is not None, reason="runs once, where the other slow tests do"),
]


@pytest.mark.parametrize(
    "name", ["lightly", "segmentation_models_pytorch", "torch_geometric", "gluonts", "chemprop", "mlcolvar"]
)
def test_trains_as_by_lightning(name):
    """Each library comes into an environment of its own; where pip doesn't get it, there is nothing to compare."""
    done = subprocess.run([sys.executable, str(PUBLISHED), name], check=False, capture_output=True, text=True)
    if "pip fails" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{name} .* facade equal", done.stdout), done.stdout
