"""Checkpoint IOs that are each broken in one way: most over core's, some over one that writes as a beginner would."""

import contextlib
import copy
import json
import os
import pickle
import random
import shutil
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from zoo import caught_by

from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.errors import CheckpointError


@caught_by("CIO-05")  # rewrites in place
@caught_by("CIO-06", "CIO-07")
@caught_by("CIO-12", "CIO-29")
class Naive(CheckpointIO):
    """``torch.save(checkpoint, path)``, and for CIO-05 into the bytes of the file before."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if storage_options:
            raise TypeError(f"storage_options {list(storage_options)}")
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        mode = "r+b" if os.path.exists(path) and os.path.getsize(path) > 50_000 else "wb"
        with open(path, mode) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        with open(path, "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=weights_only)


@caught_by("CIO-03")
class CallsNoMapLocation(TorchCheckpointIO):
    """Takes a callable for "wherever it is"."""

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        place = "cpu" if callable(map_location) else map_location
        return super().load_checkpoint(path, map_location=place, weights_only=weights_only)


@caught_by("CIO-08", "CIO-09")
class RemovesFirst(TorchCheckpointIO):
    """Between the old checkpoint and the new one there is none, and for a while half of one."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, f"{path}.new")
        with open(f"{path}.new", "rb") as file:
            data = file.read()
        os.remove(f"{path}.new")
        with open(path, "wb") as file:
            for start in range(0, len(data), len(data) // 8):
                file.write(data[start : start + len(data) // 8])
                file.flush()
                time.sleep(0.01)


class Over(TorchCheckpointIO):
    """Core's, with the signature that mutants extend."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(self.before(checkpoint, path), path, storage_options=storage_options)

    def before(self, checkpoint, path):
        return checkpoint


def mapped(value, change):
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


@caught_by("CIO-01")
class HalfWidth(Over):
    def before(self, checkpoint, path):
        wide = torch.float64
        return mapped(checkpoint, lambda v: v.float() if isinstance(v, torch.Tensor) and v.dtype == wide else v)


@caught_by("CIO-01")
class SortedKeys(Over):
    def before(self, checkpoint, path):
        return {key: checkpoint[key] for key in sorted(checkpoint)}


@caught_by("CIO-02")
class Clones(Over):
    def before(self, checkpoint, path):
        return mapped(checkpoint, lambda v: v.clone() if isinstance(v, torch.Tensor) else v)


@caught_by("CIO-03")
class IgnoresMapLocation(Over):
    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        return super().load_checkpoint(path, weights_only=weights_only)


@caught_by("CIO-04")
class Pops(Over):
    def before(self, checkpoint, path):
        taken = dict(checkpoint)
        checkpoint.pop("none", None)
        return taken


@caught_by("CIO-10")
class Private(Over):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        os.chmod(path, 0o600)


@caught_by("CIO-10")
class ElsewhereFirst(Over):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        with tempfile.TemporaryDirectory() as folder:
            super().save_checkpoint(checkpoint, os.path.join(folder, "x"), storage_options=storage_options)
            shutil.move(os.path.join(folder, "x"), path)


@caught_by("CIO-10")
class OneFolderUp(Over):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        temporary = os.path.join(os.path.dirname(os.path.dirname(path)), "x.tmp")
        super().save_checkpoint(checkpoint, temporary, storage_options=storage_options)
        os.replace(temporary, path)


@caught_by("CIO-11")
class NeedsFolders(Naive):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        torch.save(checkpoint, path)


@caught_by("CIO-11")
class Percent(Over):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, str(path) % (), storage_options=storage_options)


@caught_by("CIO-13")
class RemovesByPrefix(Over):
    def remove_checkpoint(self, path):
        folder, name = os.path.split(path)
        for other in os.listdir(folder):
            if other.startswith(name):
                os.remove(os.path.join(folder, other))


@caught_by("CIO-13")
class FollowsLinks(Over):
    def remove_checkpoint(self, path):
        super().remove_checkpoint(os.path.realpath(path))


@caught_by("CIO-13")
class RemovingNothingFails(Over):
    def remove_checkpoint(self, path):
        os.remove(path)


@caught_by("CIO-14")
class Trusting(Naive):
    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        return torch.load(path, map_location=map_location, weights_only=False)


@caught_by("CIO-15")
class TakesAnything(Over):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None, **ignored):
        super().save_checkpoint(checkpoint, path)


@caught_by("CIO-16")
class ListsByName(Over):
    def list_checkpoints(self, folder):
        return sorted(super().list_checkpoints(folder))


@caught_by("CIO-16")
class ListsParts(Over):
    """A save's own temporary file is taken for a checkpoint."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.part", "wb") as file:
            file.write(b"half of it")
        time.sleep(0.2)
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        os.remove(f"{path}.part")

    def list_checkpoints(self, folder):
        found = os.scandir(folder) if os.path.isdir(folder) else []
        return [item.path for item in sorted(found, key=lambda item: item.stat().st_mtime_ns)]

    def exists(self, path):
        return os.path.exists(path)


class Threaded(Over):
    """Saves in a thread, without a snapshot unless told."""

    def __init__(self):
        super().__init__()
        self.threads = []
        self.error = None

    def copy(self, checkpoint):
        return copy.deepcopy(checkpoint)

    def delay(self):
        return 0.05

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        taken, delay = self.copy(checkpoint), self.delay()

        def write():
            time.sleep(delay)
            try:
                TorchCheckpointIO.save_checkpoint(self, taken, path, storage_options=storage_options)
            except BaseException as error:
                self.error = error

        self.threads.append(threading.Thread(target=write))
        self.threads[-1].start()

    def wait(self):
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        error, self.error = self.error, None
        if error:
            raise error


@caught_by("CIO-17")
class NoSnapshot(Threaded):
    def copy(self, checkpoint):
        return checkpoint


@caught_by("CIO-18")
class LosesErrors(Threaded):
    def wait(self):
        with contextlib.suppress(CheckpointError):
            super().wait()


@caught_by("CIO-19")
class Reorders(Threaded):
    def delay(self):
        return 0.3 if not self.threads else 0.0


@caught_by("CIO-20", features=frozenset())
@caught_by("CIO-28", features=frozenset())
class InMemory(CheckpointIO):
    """Everything stays in this process."""

    kept: dict = {}

    def __init__(self):
        self.lock = threading.Lock()

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        self.kept[str(path)] = copy.deepcopy(checkpoint)

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        if str(path) not in self.kept:
            raise FileNotFoundError(str(path))
        return self.kept[str(path)]


@caught_by("CIO-21", says="rank")
class RankZeroOnly(Over):
    """Says that it is sharded, and writes on every rank what rank 0 should have."""

    features = frozenset({"sharded"})

    def before(self, checkpoint, path):
        return {**checkpoint, "step": dist.get_rank()}


@caught_by("CIO-22")
class OwnShards(Over):
    """Every rank a file of its own: a pool of another size finds too many or too few."""

    features = frozenset({"sharded", "reshard"})

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        local = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in checkpoint.items()}
        super().save_checkpoint(local, f"{path}-{dist.get_rank()}")

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        return super().load_checkpoint(f"{path}-{dist.get_rank()}")


@caught_by("CIO-23", says="HANG")
class BarrierInside(Over):
    def before(self, checkpoint, path):
        if dist.is_initialized():
            dist.barrier()
        return checkpoint


@caught_by("CIO-24")
class LocalOnly(Over):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, os.path.join(tempfile.gettempdir(), os.fspath(path).replace(":", "")))

    def exists(self, path):
        return os.path.exists(path)


@caught_by("CIO-25", golden=os.path.join(os.path.dirname(__file__), "golden"))
class NewFormat(Over):
    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        loaded = super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        return {**loaded, "epoch": str(loaded["epoch"])}


@caught_by("CIO-26")
class Caches(Over):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        if str(path) not in self.cache:
            self.cache[str(path)] = super().load_checkpoint(path)
        return self.cache[str(path)]

    def before(self, checkpoint, path):
        self.cache.pop(str(path), None)
        return checkpoint


@caught_by("CIO-26")
class CleansNames(Over):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, str(path).replace(" ", "_"), storage_options=storage_options)

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        return super().load_checkpoint(str(path).replace(" ", "_"))

    def exists(self, path):
        return super().exists(str(path).replace(" ", "_"))


@caught_by("CIO-27")
class TwiceInMemory(Over):
    def before(self, checkpoint, path):
        self.buffer = [pickle.dumps(checkpoint) for _ in range(2)]
        return checkpoint


@caught_by("CIO-28")
class TeardownOnce(Over):
    closed = False

    def teardown(self):
        if self.closed:
            raise RuntimeError("the pool is closed")
        self.closed = True


@caught_by("CIO-28", features=frozenset())
class DropsTheQueue(Threaded):
    def teardown(self):
        self.threads.clear()

    def delay(self):
        return 0.5


@caught_by("CIO-12")
class AsText(Over):
    """A reader that takes anything for a checkpoint."""

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        try:
            return super().load_checkpoint(path)
        except CheckpointError:
            return json.loads("{}")


@caught_by("CIO-30")
class RecognizesAnyFile(TorchCheckpointIO):
    """A file's existence is taken for its format."""

    def recognizes(self, path):
        return os.path.exists(path)


@caught_by("CIO-30")
class RecognizesItsEnding(TorchCheckpointIO):
    def recognizes(self, path):
        return os.path.isfile(path) and os.path.basename(path).startswith("own")


@caught_by("CIO-30")
class RecognizesNothing(TorchCheckpointIO):
    """As an IO of an earlier release, which has the default."""

    def recognizes(self, path):
        return False


@caught_by("CIO-30")
class RecognizesWholeFiles(TorchCheckpointIO):
    """A damaged file of its own is nobody's."""

    def recognizes(self, path):
        return self.exists(path)


@caught_by("CIO-30")
class RecognizesByLoading(TorchCheckpointIO):
    def recognizes(self, path):
        if not super().recognizes(path):
            return False
        with open(path, "rb") as file:
            file.read()
        return True


@caught_by("CIO-30")
class RecognizesOrRaises(TorchCheckpointIO):
    def recognizes(self, path):
        with open(path, "rb") as file:
            file.read(1)
        return super().recognizes(path)


@caught_by("CIO-30")
class RecognizesWithBytes(TorchCheckpointIO):
    """The answer is no bool."""

    def recognizes(self, path):
        return b"PK" if super().recognizes(path) else b""


@caught_by("CIO-30")
class RecognizesAnyZip(TorchCheckpointIO):
    def recognizes(self, path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read(2) == b"PK"
        return False


@caught_by("CIO-31")
class ExtensionWithoutDot(TorchCheckpointIO):
    extension = "ckpt"


@caught_by("CIO-31")
class ExtensionWithFolder(TorchCheckpointIO):
    extension = ".d/x"


@caught_by("CIO-31")
class ExtensionNotListed(TorchCheckpointIO):
    """Names end in it, and the listing shows others only."""

    extension = ".acme"

    def list_checkpoints(self, folder):
        return [path for path in super().list_checkpoints(folder) if path.endswith(".ckpt")]


@caught_by("CIO-70")
class MovesTheProcess(TorchCheckpointIO):
    """A native writer that takes short paths only."""

    def save_checkpoint(self, checkpoint, path, *arguments, **options):
        path = os.path.abspath(path)
        super().save_checkpoint(checkpoint, path, *arguments, **options)
        os.chdir(os.path.dirname(path))


@caught_by("CIO-70")
class LoadsInDouble(TorchCheckpointIO):
    def load_checkpoint(self, path, *arguments, **options):
        torch.set_default_dtype(torch.float64)
        return super().load_checkpoint(path, *arguments, **options)


@caught_by("CIO-70")
class DrawsNames(TorchCheckpointIO):
    """A random name for its temporary file, from the user's random numbers."""

    def save_checkpoint(self, checkpoint, path, *arguments, **options):
        random.random()
        super().save_checkpoint(checkpoint, path, *arguments, **options)
