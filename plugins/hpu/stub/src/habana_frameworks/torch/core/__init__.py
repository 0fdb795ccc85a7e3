"""Step marks, and what the bridge puts in the place of torch's functions."""

from __future__ import annotations

import sys

import torch
from habana_frameworks.torch import hpu
from habana_frameworks.torch.utils.internal import is_lazy

from .step_closure import add_step_closure, iter_mark_step, mark_step
from .torch_overwrites import overwrite_torch_functions

__all__ = ["add_step_closure", "is_lazy", "iter_mark_step", "mark_step", "overwrite_torch_functions"]

torch.hpu = sys.modules["torch.hpu"] = hpu  # type: ignore[attr-defined]  # the simulator's own module stood there
overwrite_torch_functions()
if not is_lazy():
    import habana_frameworks.torch.dynamo.compile_backend  # noqa: F401 (registers itself)
