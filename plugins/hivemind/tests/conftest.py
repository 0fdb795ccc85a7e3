"""Test modules and the scripts that they start share what stands in ``peer.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
