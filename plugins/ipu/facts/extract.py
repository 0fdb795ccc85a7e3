"""Read poptorch's API out of its sources: ``extract.py POPTORCH > poptorch.tsv``.

POPTORCH is a checkout of github.com/graphcore/poptorch. How the lines read: ``tests/vendor_sources.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))
from vendor_sources import Sources

MODULES = ("", "enums", "ops", "optim", "options")
PRIVATE = ("_TrainingOptions", "_PrecisionOptions", "_DistributedOptions", "_PopartOptions")
"""The classes of what Options.Training, Precision, Distributed and _Popart are."""

if __name__ == "__main__":
    sources = Sources(Path(sys.argv[1]) / "python", "poptorch", PRIVATE, inherit=True)
    print("\n".join(sorted(sources.lines(MODULES))))
