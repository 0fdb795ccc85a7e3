"""Put this folder on sys.path: the mutants' modules are imported by name, here and in the checks' processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
