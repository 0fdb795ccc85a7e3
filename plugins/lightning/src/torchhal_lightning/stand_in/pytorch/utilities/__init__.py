"""Functions and classes of Lightning's utilities that scripts import."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import fsspec
import torch
from torch import nn

from torchhal import rng
from torchhal import seed_everything as _seed_everything
from torchhal.pytree import move_to_device
from torchhal.trainer.adapters import implements
from torchhal_lightning._picklable import is_picklable
from torchhal_lightning.stand_in.pytorch.utilities import combined_loader, exceptions, migration, rank_zero, types
from torchhal_lightning.stand_in.pytorch.utilities.combined_loader import CombinedLoader
from torchhal_lightning.stand_in.pytorch.utilities.exceptions import MisconfigurationException
from torchhal_lightning.stand_in.pytorch.utilities.rank_zero import (
    LightningDeprecationWarning,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from torchhal_lightning.stand_in.pytorch.utilities.types import _DEVICE, _MAP_LOCATION_TYPE, _PATH

__all__ = [
    "_DEVICE",
    "_MAP_LOCATION_TYPE",
    "_PATH",
    "AttributeDict",
    "CombinedLoader",
    "GradClipAlgorithmType",
    "LightningDeprecationWarning",
    "LightningEnum",
    "MisconfigurationException",
    "PossibleUserWarning",
    "combined_loader",
    "disable_possible_user_warnings",
    "exceptions",
    "find_shared_parameters",
    "garbage_collection_cuda",
    "get_filesystem",
    "grad_norm",
    "is_overridden",
    "is_picklable",
    "isolate_rng",
    "migration",
    "move_data_to_device",
    "rank_zero",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
    "suggested_max_num_workers",
    "types",
]


class LightningEnum(str, Enum):
    """Members that equal their words."""

    __str__ = str.__str__
    __hash__ = str.__hash__


class GradClipAlgorithmType(LightningEnum):
    """How gradients are clipped."""

    VALUE = "value"
    NORM = "norm"


class PossibleUserWarning(UserWarning):
    """Lightning's, for filters."""


class AttributeDict(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"Missing attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators; see :func:`torchhal.seed_everything`.

    Args:
        seed: None: of ``PL_GLOBAL_SEED``, else 0.
        workers: whether those of loaders' workers follow from it.
        verbose: taken and not used.
    """
    if seed is None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    return _seed_everything(seed, workers=workers)


def move_data_to_device(batch: Any, device: Any) -> Any:
    """Return ``batch`` with its tensors, and what else has ``to``, on ``device``."""
    return move_to_device(batch, torch.device(device))


def get_filesystem(path: Any, **kwargs: Any) -> Any:
    """Return fsspec's file system of a path or URL."""
    return fsspec.core.url_to_fs(os.fspath(path), **kwargs)[0]


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, float]:
    """Return the norm of each parameter's gradient and of all.

    Args:
        module: after a backward.
        norm_type: the order of the norm, "inf" too.
        group_separator: in the names.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"'norm_type' must be above 0 (got {norm_type!r})")
    norms = {
        f"grad_{order}_norm{group_separator}{name}": parameter.grad.data.norm(order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.tensor(list(norms.values())).norm(order)
    return norms


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Give this process's generators their state back at the end.

    Args:
        include_cuda: those of GPUs too.
    """
    state = rng.collect_host()
    gpus = torch.cuda.get_rng_state_all() if include_cuda and torch.cuda.is_available() else None
    try:
        yield
    finally:
        rng.restore_host(state)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Whether the class of ``instance`` has a body of its own for a method."""
    if instance is None:
        return False
    if parent is None:
        return implements(instance, method_name)
    return getattr(type(instance), method_name, None) is not getattr(parent, method_name, None)


def garbage_collection_cuda() -> None:
    """Collect garbage, and free the memory of GPUs that nothing uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return how many workers each process's loader may have on this node."""
    if local_world_size < 1:
        raise ValueError(f"'local_world_size' must be 1 or more (got {local_world_size})")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore warnings of the category PossibleUserWarning."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
