"""Checkpoints: save a dictionary of state as one file or several, and load it."""

from torchhal.checkpoint._local_file import sync_folder
from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._location import CheckpointLocation
from torchhal.checkpoint._map_location import apply_map_location, read
from torchhal.checkpoint._save_time import next_ns, seen
from torchhal.checkpoint._validation import inspect_contents
from torchhal.checkpoint.base import CheckpointIO
from torchhal.checkpoint.folder import FolderCheckpointIO, swap_directories
from torchhal.checkpoint.torch_file import TorchCheckpointIO

__all__ = [
    "CheckpointIO",
    "CheckpointLocation",
    "FolderCheckpointIO",
    "TorchCheckpointIO",
    "apply_map_location",
    "inspect_contents",
    "location_of",
    "next_ns",
    "read",
    "seen",
    "swap_directories",
    "sync_folder",
]
