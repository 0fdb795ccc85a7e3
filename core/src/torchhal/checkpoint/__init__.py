"""Checkpoints: how a dictionary of state becomes a file, or many, and comes back."""

from torchhal.checkpoint.base import CheckpointIO
from torchhal.checkpoint.torch_file import TorchCheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO"]
