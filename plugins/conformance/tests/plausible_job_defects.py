"""Checkpoint IOs and cluster environments with defects that an author may plausibly ship.

Each was written from the contract alone, before the check that catches it: the defect shows for some inputs, in the
second group, in the second life or in the second call only.
"""

import os
from contextlib import suppress

import torch
from mutants_cluster_environment import Scheduler
from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import TorchElasticEnvironment
from torchhal.pytree import map_tensors
from torchhal_conformance._launcher_env import TABLES

# -- checkpoint IOs ------------------------------------------------------------------------------------------


@caught_by("CIO-26")
class CachesLoads(TorchCheckpointIO):
    """Keeps what it has loaded and returns the same object again."""

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        cache = self.__dict__.setdefault("_cache", {})
        try:
            key = (os.fspath(path), os.stat(path).st_mtime_ns, str(map_location))
        except OSError:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        if key not in cache:
            cache.clear()
            cache[key] = super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        return cache[key]


@caught_by("CIO-01")
class FlatKeys(TorchCheckpointIO):
    """Joins the keys of nested dictionaries by dots."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        def flatten(value, prefix):
            if type(value) is dict and value and all(isinstance(key, str) for key in value):
                for key, item in value.items():
                    yield from flatten(item, [*prefix, key])
            else:
                yield ".".join(prefix), value

        flat = dict(flatten(checkpoint, []))
        super().save_checkpoint({"flat": flat}, path, storage_options=storage_options)

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        flat = super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        if "flat" not in flat:
            return flat
        nested = {}
        for name, value in flat["flat"].items():
            *parents, last = name.split(".")
            inner = nested
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
        return nested


@caught_by("CIO-01")
class EightBitsAsFloat(TorchCheckpointIO):
    """Stores 8-bit floating-point numbers as float32."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        def widen(leaf):
            narrow = torch.is_tensor(leaf) and leaf.is_floating_point() and leaf.element_size() == 1
            return leaf.float() if narrow else leaf

        super().save_checkpoint(map_tensors(checkpoint, widen), path, storage_options=storage_options)


@caught_by("CIO-01")
class PhysicalValues(TorchCheckpointIO):
    """Writes the memory of a lazily conjugated or negated tensor, without its bit."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        def physical(leaf):
            if torch.is_tensor(leaf) and leaf.is_conj():
                return torch.conj(leaf).clone()
            if torch.is_tensor(leaf) and leaf.is_neg():
                return -leaf.resolve_neg()
            return leaf

        super().save_checkpoint(map_tensors(checkpoint, physical), path, storage_options=storage_options)


@caught_by("CIO-01")
class DeepTuplesAreLists(TorchCheckpointIO):
    """Turns tuples inside of lists into lists."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        def plain(value, in_list):
            if type(value) in (list, tuple):
                items = [plain(item, True) for item in value]
                return items if in_list and len(items) != 2 else type(value)(items)
            return {key: plain(item, in_list) for key, item in value.items()} if type(value) is dict else value

        super().save_checkpoint(plain(checkpoint, False), path, storage_options=storage_options)


@caught_by("CIO-02")
class DeepTiesBreak(TorchCheckpointIO):
    """Keeps tensors together that share memory at the top, and copies those in lists."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        copied = {
            key: map_tensors(value, lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf)
            if isinstance(value, list)
            else value
            for key, value in checkpoint.items()
        }
        super().save_checkpoint(copied, path, storage_options=storage_options)


@caught_by("CIO-28")
class LeavesFilesOpen(TorchCheckpointIO):
    """Keeps a descriptor of each file that it reads."""

    def load_checkpoint(self, path, *, map_location="cpu", weights_only=True):
        loaded = super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        self.__dict__.setdefault("_open", []).append(open(path, "rb"))  # noqa: SIM115
        return loaded


@caught_by("CIO-09", features={"atomic"})
class OneTemporaryName(TorchCheckpointIO):
    """Writes to a temporary file of one name, whoever else does."""

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if storage_options:
            return super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        temporary = f"{os.fspath(path)}.part"
        try:
            super().save_checkpoint(checkpoint, temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


# -- cluster environments ------------------------------------------------------------------------------------


@caught_by("ENV-06")
class NegativeRanks(TorchElasticEnvironment):
    """Takes any whole number for a rank."""

    def global_rank(self):
        try:
            return int(os.environ["RANK"])
        except (KeyError, ValueError):
            return super().global_rank()


@caught_by("ENV-10")
class RestoresASnapshot(TorchElasticEnvironment):
    """Restores all variables to what they were when it was made."""

    def __init__(self):
        self._before = dict(os.environ)

    def teardown(self):
        for name in set(os.environ) - set(self._before):
            del os.environ[name]
        os.environ.update(self._before)


@caught_by("ENV-16")
class KeepsItsRank(TorchElasticEnvironment):
    """Keeps the numbers that it has read first; only a pickled copy forgets them."""

    def __init__(self):
        self._kept = {}

    def __getstate__(self):
        return {"_kept": {}}

    def local_rank(self):
        return self._kept.setdefault("local", super().local_rank())


@caught_by("ENV-11")
class ComparesProducts(TorchElasticEnvironment):
    """Compares only the number of all processes."""

    def validate_settings(self, *, num_devices, num_nodes):
        if num_devices * num_nodes != self.world_size():
            super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)


@caught_by("ENV-07", tables=TABLES["slurm"])
class PortBeyondTheLast(Scheduler):
    """Adds the job's number to a port."""

    @property
    def main_port(self):
        return 15000 + int(os.environ["SLURM_JOB_ID"])


@caught_by("ENV-07")
class JobOfEachRank(TorchElasticEnvironment):
    """Identifies the job by the process."""

    def job_id(self):
        return f"{os.environ.get('TORCHELASTIC_RUN_ID')}-{os.environ.get('RANK')}"
