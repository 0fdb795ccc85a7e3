"""Blind defects: five checkpoint IOs with one mistake each."""

from __future__ import annotations

import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from sound_components import ThreadedTorch, has_graph
from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO, location_of, seen
from torchhal.pytree import map_tensors


@caught_by("CIO-65")
class LiveListsCheckpointIO(ThreadedTorch):
    """The asynchronous save copies the tensors; lists and dicts without a tensor in them stay the running model's."""

    # docs/reference/checkpoint-io.md, save_checkpoint: "An `"async"` one may return earlier: it has then copied every
    # value."
    # A callback's history, a sampler's position, the counters of the loops change while the file is written: the
    # checkpoint has the weights of one step and the counters of a later one, and a resume leaves out batches.

    def _copied(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        memo: dict[int, Any] = {}  # memory that tensors share is copied once

        def cloned(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return copy.deepcopy(leaf.detach() if has_graph(leaf) else leaf, memo)

        copied: dict[str, Any] = map_tensors(checkpoint, cloned)
        return copied


@caught_by("CIO-60")
class ErrorForgottenCheckpointIO(ThreadedTorch):
    """The error of an asynchronous save is lost when another save begins before anyone has waited."""

    # docs/reference/checkpoint-io.md, wait: "`Exception`: the error of a save that no earlier call has raised."
    # best.ckpt fails as the quota is reached, last.ckpt is saved after it, and wait() raises nothing: the run ends
    # well, with the best checkpoint counted and not there.

    def _start(self, work: Callable[[], None]) -> None:
        self._errors = []
        super()._start(work)


class _Hash:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@caught_by("CIO-16")
class UnchangedSaveSkippedCheckpointIO(TorchCheckpointIO):
    """A save of what the file holds already is left out, so its time stays that of the earlier save."""

    # docs/reference/checkpoint-io.md, list_checkpoints: "Return the completed checkpoints directly in `folder`, the
    # last saved one last."
    # a.ckpt, then b.ckpt, then a.ckpt again with the weights of before (a run that went back to its best ones):
    # ckpt_path="last" resumes from b.ckpt, the weights that were given up.

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._saved: dict[str, tuple[str, tuple[int, ...]]] = {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        location_of(path, self.storage_options, storage_options)
        text = os.fspath(path)
        if "://" in text or not isinstance(checkpoint, dict):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        key, digest = os.path.abspath(text), _digest(checkpoint)
        known = self._saved.pop(key, None)
        if known is None or digest is None or known != (digest, _fingerprint(key)):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        if digest is not None:
            self._saved[key] = (digest, _fingerprint(key))


def _digest(checkpoint: dict[str, Any]) -> str | None:
    """Return a hash of what a save writes; None for what can't be saved."""
    writer: Any = _Hash()
    try:
        torch.save(checkpoint, writer)
    except Exception:
        return None
    return writer.hexdigest()


def _fingerprint(path: str) -> tuple[int, ...]:
    try:
        about = os.stat(path)
    except OSError:
        return ()
    return (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@caught_by("CIO-61")
class MetadataLostCheckpointIO(TorchCheckpointIO):
    """A save moves tensors to the CPU in new dictionaries, which lack the ``_metadata`` of a module's state dict."""

    # docs/reference/checkpoint-io.md, load_checkpoint: "Return the checkpoint that `save_checkpoint` wrote at `path`."
    # torch keeps the versions of a module's layers there. Loaded without them a state counts as one of before
    # versions, and a layer that converts old states (transposes, rescales, renumbers) converts a new one again: it
    # loads without an error, with other weights.

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        on_cpu = _on_cpu(checkpoint) if isinstance(checkpoint, dict) else checkpoint
        super().save_checkpoint(on_cpu, path, storage_options=storage_options)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else value.cpu()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _on_cpu(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(each) for each in value)
    return value


@caught_by("CIO-62")
class LargeFilesUnverifiedCheckpointIO(TorchCheckpointIO):
    """The checksum of a file above 8 MiB isn't verified by a load, as reading it twice takes long."""

    # docs/reference/checkpoint-io.md, load_checkpoint: "`CheckpointCorruptError`: it is damaged: other values than were
    # saved are never returned.", and features: "`"checksum"`: one flipped bit is refused."
    # Just the checkpoints of real models are not checked: a bit that a disk or a copy has flipped in an exponent
    # is loaded, and the run goes on from it.

    unverified_above: ClassVar[int] = 8 << 20

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        text = path if isinstance(path, str) else ""
        if isinstance(path, os.PathLike):
            text = os.fspath(path)
        is_large = "://" not in text and os.path.isfile(text) and os.path.getsize(text) > self.unverified_above
        if is_large and isinstance(weights_only, bool) and self.exists(path):
            try:
                loaded = torch.load(text, map_location=map_location, weights_only=weights_only)
            except Exception:
                loaded = None  # the inherited load says what it is
            if isinstance(loaded, dict):
                seen(self.saved_ns(path))
                return loaded
        return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
