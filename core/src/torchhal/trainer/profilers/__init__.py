"""Time the actions of a training step: loading, transfer, forward, backward, clipping, the optimizer, callbacks."""

from torchhal.trainer.profilers.base import PassThroughProfiler, Profiler
from torchhal.trainer.profilers.simple import SimpleProfiler
from torchhal.trainer.profilers.torch_profiler import TorchProfiler

__all__ = ["PassThroughProfiler", "Profiler", "SimpleProfiler", "TorchProfiler"]
