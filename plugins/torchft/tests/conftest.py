"""Test modules and the scripts that they start share what stands beside them; the lighthouse, other tests need too."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[2] / "tests"))
