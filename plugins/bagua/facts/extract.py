"""Read Bagua's API out of its sources: ``extract.py BAGUA > bagua.tsv``.

BAGUA is a checkout of github.com/BaguaSys/bagua. How the lines read: ``tests/vendor_sources.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))
from vendor_sources import Sources

MODULES = (
    "torch_api",
    "torch_api.algorithms",
    "torch_api.algorithms.async_model_average",
    "torch_api.algorithms.base",
    "torch_api.algorithms.bytegrad",
    "torch_api.algorithms.decentralized",
    "torch_api.algorithms.gradient_allreduce",
    "torch_api.algorithms.q_adam",
    "torch_api.bucket",
    "torch_api.communication",
    "torch_api.data_parallel",
    "torch_api.data_parallel.bagua_distributed",
    "torch_api.data_parallel.distributed",
    "torch_api.distributed",
    "torch_api.env",
)
PRIVATE = ("_reset_algorithm_state",)
"""What the plugin needs although it isn't public."""

if __name__ == "__main__":
    sources = Sources(Path(sys.argv[1]) / "bagua", "bagua", PRIVATE)
    print("\n".join(sorted(sources.lines(MODULES))))
