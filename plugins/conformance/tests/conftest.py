"""The zoo's modules are imported by name, here and in the processes of the checks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
