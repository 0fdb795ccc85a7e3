"""Checkpoint IOs that are wrong about links, leftovers, odd values, damage, full disks or options of storage."""

import contextlib
import os
import shutil
import time

import torch
from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.checkpoint._checksum import read_ending
from torchhal.errors import CheckpointError


@caught_by("CIO-50", says="after a save over")
class LinksByName(TorchCheckpointIO):
    """A symbolic link shows whatever is saved over its target."""

    def link_checkpoint(self, source, target):
        if not self.exists(source):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        os.symlink(source, target)
        return True


@caught_by("CIO-50", says="a link to a name that is taken")
class LinksOnce(TorchCheckpointIO):
    def link_checkpoint(self, source, target):
        return not (os.path.exists(target) and not os.path.samefile(source, target)) and super().link_checkpoint(
            source, target
        )


@caught_by("CIO-50", says="Operation not permitted")
class NeedsLinks(TorchCheckpointIO):
    def link_checkpoint(self, source, target):
        if not os.path.isfile(source) or os.path.isdir(target):
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(source, target):
                return True
            os.unlink(target)
        try:
            os.link(source, target)
        except FileNotFoundError as error:
            raise CheckpointError(str(error)) from error
        return True


@caught_by("CIO-51", says="removal")
class RemovesTrees(TorchCheckpointIO):
    def remove_checkpoint(self, path):
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            super().remove_checkpoint(path)


@caught_by("CIO-51", says="exists")
class AnyPathExists(TorchCheckpointIO):
    def exists(self, path):
        return os.path.isdir(path) or super().exists(path)


@caught_by("CIO-52", says="list")
class LoadsLists(TorchCheckpointIO):
    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        try:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        except CheckpointError as error:
            if "must hold a dict" in str(error):
                return torch.load(path, weights_only=True)
            raise


@caught_by("CIO-52", says="plain")
class OwnFilesOnly(TorchCheckpointIO):
    """exists() takes a file of plain torch.save's, and the load refuses it."""

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                data = file.read()
            ending = read_ending(data[:4], data[-100:])
            if ending is not None and not ending.sealed:
                raise CheckpointError(f"{path} was not written by this class")
        return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)


@caught_by("CIO-53", says="is refused")
class ThreeLevels(TorchCheckpointIO):
    """Walks the checkpoint to see what can't be saved, and takes what is deep for a cycle."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        def depth(value):
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            return 1 + max(map(depth, values), default=0)

        if depth(checkpoint) > 20:
            raise CheckpointError("the checkpoint holds itself")
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


@caught_by("CIO-53", says="and the load refuses it")
class LooksAtTheTop(TorchCheckpointIO):
    """Refuses what stands at the top of a checkpoint, and saves it anywhere else."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if any(type(value) is object for value in checkpoint.values()):
            raise CheckpointError("'odd' holds an object")
        torch.save(checkpoint, path)


@caught_by("CIO-53", says="name the key")
class RefusesWithoutAKey(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        try:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        except CheckpointError:
            if isinstance(checkpoint.get("nest"), dict):
                raise CheckpointError("something in the checkpoint can't be saved") from None
            raise


@caught_by("CIO-54", says="whose process was killed")
class NeverSweeps(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        temporary = f"{os.fspath(path)}.{os.getpid()}.part"
        torch.save(checkpoint, temporary)
        os.replace(temporary, path)

    def exists(self, path):
        return not os.fspath(path).endswith(".part") and super().exists(path)

    def list_checkpoints(self, folder):
        return [path for path in super().list_checkpoints(folder) if not path.endswith(".part")]


@caught_by("CIO-54", says="disturbed")
class SweepsAll(TorchCheckpointIO):
    """Removes every temporary file in the folder, of whomever."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        folder = os.path.dirname(path)
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.startswith(".torchhal-tmp-") and "mine" not in name:
                os.unlink(os.path.join(folder, name))
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


class _Renaming(TorchCheckpointIO):
    """Writes to a temporary file and renames it, without what brings either to the disk."""

    synced: tuple[str, ...] = ()

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, ".x.part")
        torch.save(checkpoint, temporary)
        if "file" in self.synced:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if "folder" in self.synced:
            fd = os.open(folder, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


@caught_by("CIO-55", features=frozenset({"atomic"}), says="before it was brought")
class RenamesUnwritten(_Renaming):
    synced = ("folder",)


@caught_by("CIO-55", features=frozenset({"atomic"}), says="the folder of the checkpoint")
class ForgetsTheFolder(_Renaming):
    synced = ("file",)


@caught_by("CIO-55", features=frozenset({"atomic"}), says="in which a folder was made")
class ForgetsNewFolders(_Renaming):
    synced = ("file", "folder")


@caught_by("CIO-56", features=frozenset({"checksum"}), says="changed")
class SumsTheFirstHalf(TorchCheckpointIO):
    """Bytes near the end are in no sum."""

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        try:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        except CheckpointError:
            size = os.path.getsize(path)
            with open(path, "rb") as file:
                data = file.read()
            if size > 1000 and data[:4] == b"PK\x03\x04" and data[-8:].isalnum():
                return torch.load(path, weights_only=True)
            raise


@caught_by("CIO-57", says="OSError of the write")
class HidesTheCause(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        try:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        except CheckpointError as error:
            raise CheckpointError(str(error)) from None


@caught_by("CIO-57", says="files are open")
class LosesDescriptors(TorchCheckpointIO):
    lost: list = []

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        try:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        except CheckpointError:
            self.lost.append(os.open(os.path.dirname(path), os.O_RDONLY))
            raise


@caught_by("CIO-58", features=frozenset({"fsspec"}), says="the options of load_checkpoint")
class OptionsOfSavesOnly(TorchCheckpointIO):
    """The options of the instance reach saves alone."""

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        return TorchCheckpointIO().load_checkpoint(path, map_location=map_location, weights_only=weights_only)


@caught_by("CIO-58", features=frozenset({"fsspec"}), says="Path")
class AnyPathAsText(TorchCheckpointIO):
    """str() of a path, in which one slash is missing, is a local path."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, str(path), storage_options=storage_options)


@caught_by("CIO-59", says="set back")
class TimesOfTheClock(TorchCheckpointIO):
    """Sorts by the clock's time of each save."""

    times: dict = {}

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        self.times[os.fspath(path)] = time.time_ns()

    def list_checkpoints(self, folder):
        return sorted(super().list_checkpoints(folder), key=lambda path: (self.times.get(path, 0), path))
