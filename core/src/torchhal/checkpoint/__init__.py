"""Checkpoints: how a dictionary of state becomes a file, or many, and comes back."""

from torchhal.checkpoint._local_file import sync_folder
from torchhal.checkpoint._locate import place_of
from torchhal.checkpoint._map_location import read
from torchhal.checkpoint._save_time import next_ns
from torchhal.checkpoint._validation import inspect_contents
from torchhal.checkpoint.base import CheckpointIO
from torchhal.checkpoint.folder import FolderCheckpointIO, exchange
from torchhal.checkpoint.torch_file import TorchCheckpointIO

__all__ = [
    "CheckpointIO",
    "FolderCheckpointIO",
    "TorchCheckpointIO",
    "exchange",
    "inspect_contents",
    "next_ns",
    "place_of",
    "read",
    "sync_folder",
]
