"""Provide strategies ``fairscale_oss``, ``fairscale_sdp`` and ``fairscale_pipe``: training with the package fairscale.

Importing this package imports neither torch nor fairscale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchhal.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchhal_fairscale.fsdp import FairscaleFSDPStrategy
    from torchhal_fairscale.oss import FairscaleOSSStrategy
    from torchhal_fairscale.pipe import FairscalePipeStrategy
    from torchhal_fairscale.sharded_ddp import FairscaleSDPStrategy

__version__ = "0.2.0"

__all__ = ["FairscaleFSDPStrategy", "FairscaleOSSStrategy", "FairscalePipeStrategy", "FairscaleSDPStrategy"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "FairscaleFSDPStrategy": "fsdp",
        "FairscaleOSSStrategy": "oss",
        "FairscalePipeStrategy": "pipe",
        "FairscaleSDPStrategy": "sharded_ddp",
    },
)
