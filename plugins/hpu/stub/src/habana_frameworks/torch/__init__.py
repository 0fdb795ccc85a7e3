"""A stub of Intel's bridge between torch and Gaudi: its names, over a simulated device. See the distribution's README.

What is in it has the names and signatures of the vendor's 1.19.0; what isn't raises AttributeError or ImportError.
"""

from __future__ import annotations

import habana_frameworks_stub.opening  # isort: skip # noqa: F401 (before anything of torch)

import habana_frameworks.torch.core
import habana_frameworks.torch.distributed.hccl  # noqa: F401 (registers the backend)
import habana_frameworks.torch.hpu as hpu
from habana_frameworks.torch.utils.internal import is_lazy
from habana_frameworks_stub import __version__ as __version__

__all__ = ["hpu", "is_lazy"]
