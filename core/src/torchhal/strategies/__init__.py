"""Strategies: run a model and its optimizers on one or several processes."""

from torchhal._overrides import overrides
from torchhal.strategies._forward_through import forward_through
from torchhal.strategies._replica_consistency import check_frequencies, check_lookups, find_difference
from torchhal.strategies._step_result import StepResult
from torchhal.strategies._steps import around_call
from torchhal.strategies.base import Strategy
from torchhal.strategies.ddp import DDPStrategy
from torchhal.strategies.parallel import PARALLEL_ARGUMENTS, ParallelStrategy
from torchhal.strategies.single_device import SingleDeviceStrategy

__all__ = [
    "PARALLEL_ARGUMENTS",
    "DDPStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "StepResult",
    "Strategy",
    "around_call",
    "check_frequencies",
    "check_lookups",
    "find_difference",
    "forward_through",
    "overrides",
]
