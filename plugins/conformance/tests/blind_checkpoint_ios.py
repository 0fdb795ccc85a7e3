"""Checkpoint IOs of one defect each, written from the contract by somebody who had read no check."""

import glob
import logging
import os
import pickle
import secrets
from contextlib import suppress

import torch
from sound_components import SameTorch
from torch import serialization
from zoo import caught_by

from torchhal.checkpoint import _save_time, inspect_contents
from torchhal.checkpoint._checksum import ChecksumWriter
from torchhal.checkpoint._local_file import sync_folder
from torchhal.checkpoint._storage_compaction import pickle_module
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal.pytree import map_tensors


def is_url(path):
    return "://" in os.fspath(path)


@caught_by("CIO-51")
class RemovesFirst(SameTorch):
    """Removes the previous checkpoint before the new one, which is complete, gets its name."""

    # checkpoint-io.md, features: '"atomic": a save survives SIGKILL, and readers never see a gap.'
    # A job killed between the two calls has no checkpoint of that name, and an evaluation that polls finds none.

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if is_url(path) or os.path.isdir(path):
            return super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        fresh = os.path.join(os.path.dirname(path), f".new-{os.getpid()}-{secrets.token_hex(4)}")
        super().save_checkpoint(checkpoint, fresh, storage_options=storage_options)
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.rename(fresh, path)
        sync_folder(os.path.dirname(path) or ".")


@caught_by("CIO-51")
class OneTemporaryName(SameTorch):
    """Writes to the checkpoint's name with ".tmp" behind it, whoever writes, and renames that."""

    # checkpoint-io.md, "A checkpoint exists completely or not at all."; CIO-09: "Two processes may save over it at
    # once: the checkpoint is then one of theirs."
    # Two writers silently mix their bytes in one file.

    features = SameTorch.features - {"streaming"}

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if is_url(path) or os.path.isdir(path) or storage_options or not isinstance(checkpoint, dict):
            return super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        replaced = inspect_contents(checkpoint)
        temporary = f"{os.fspath(path)}.tmp"
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(temporary, "wb") as file:
                sealing = ChecksumWriter(file)
                try:
                    pickler = pickle_module(replaced) if replaced else pickle
                    serialization.save(checkpoint, sealing, pickle_module=pickler)
                except BaseException:
                    if sealing.error is None:
                        raise
                if sealing.error is not None:
                    raise sealing.error
                sealing.seal(_save_time.next_ns())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(os.path.dirname(path) or ".")
        except BaseException as error:
            with suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            raise CheckpointError(f"{os.fspath(path)!r} could not be saved: {error}") from error


@caught_by("CIO-02")
class SplitsViews(SameTorch):
    """Saves a copy of each tensor: equal views of a memory stay one, others that overlap come apart."""

    # checkpoint-io.md, save_checkpoint: "Tensors that share memory still do after a load."
    # A resumed run silently trains a part of a tied weight for itself.

    features = SameTorch.features - {"streaming"}

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        copies = {}

        def copied(leaf):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.__dict__ or leaf.is_quantized:
                return leaf
            if leaf.layout is not torch.strided or not leaf.numel():
                return leaf
            key = (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg())
            if key not in copies:
                copies[key] = leaf.detach().clone()
            copy = copies[key]
            return torch.nn.Parameter(copy, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else copy

        if isinstance(checkpoint, dict):
            checkpoint = map_tensors(checkpoint, copied)
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


@caught_by("CIO-04")
class WritesItsVersion(SameTorch):
    """Puts the version of its format into the dictionary that it was given, and takes it out of what it loads."""

    # checkpoint-io.md, save_checkpoint, "checkpoint: ...; not changed."
    # The caller's dictionary has one key more after each save.

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if isinstance(checkpoint, dict):
            checkpoint["acme_version"] = 1
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path, **options):
        loaded = super().load_checkpoint(path, **options)
        loaded.pop("acme_version", None)
        return loaded

    def open_checkpoint(self, path):
        opened = super().open_checkpoint(path)
        opened.pop("acme_version", None)
        return opened


@caught_by("CIO-07")
class LogsAFullDisk(SameTorch):
    """Logs a warning where the system refuses a write, and lets the run go on."""

    # checkpoint-io.md, save_checkpoint, Raises: "CheckpointError: it could not be written; the cause is chained."
    # A run of a week silently has no checkpoint.

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        try:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            logging.getLogger("acme").warning("no checkpoint this time: %s", error)


@caught_by("CIO-14")
class TriesWithoutWeightsOnly(SameTorch):
    """Loads a file that weights_only refuses a second time, without it."""

    # checkpoint-io.md, load_checkpoint, "weights_only: execute nothing that the file holds."
    # A file from the internet silently runs its code.

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        try:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        except CheckpointCorruptError:
            raise
        except CheckpointError:
            return super().load_checkpoint(path, map_location=map_location, weights_only=False)


@caught_by("CIO-16")
class ListsByName(SameTorch):
    """Lists checkpoints in the order of their names."""

    # checkpoint-io.md, list_checkpoints: "Return the completed checkpoints directly in folder, the last saved one
    # last."
    # A run silently continues from epoch 9 in place of epoch 10.

    def list_checkpoints(self, folder):
        return sorted(super().list_checkpoints(folder))


@caught_by("CIO-13")
class RemovesTheStem(SameTorch):
    """Removes with a checkpoint what else has its name with another ending, as if these were parts of it."""

    # checkpoint-io.md, remove_checkpoint: "Delete exactly what a save wrote at path; do nothing if there is nothing."
    # The user's notes and exports beside a checkpoint silently go with it.

    def remove_checkpoint(self, path):
        super().remove_checkpoint(path)
        if not is_url(path):
            for other in glob.glob(glob.escape(os.path.splitext(os.fspath(path))[0]) + ".*"):
                if os.path.isfile(other):
                    os.unlink(other)
