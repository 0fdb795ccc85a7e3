"""Translate Lightning's accelerators, precisions, checkpoint IOs and cluster environments into torchhal's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import Request
from torchhal_lightning import _trees as trees
from torchhal_lightning._foreign_parts import WrappedCheckpointIO, WrappedClusterEnvironment
from torchhal_lightning._translated_strategies import STRATEGIES

ACCELERATORS = {"CPUAccelerator": "cpu", "CUDAAccelerator": "gpu", "MPSAccelerator": "mps", "XLAAccelerator": "tpu"}
"""Lightning's class -> its alias here."""

_PRECISIONS = (
    "Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision", "FSDPPrecision", "DeepSpeedPrecision",
    "XLAPrecision",
)  # fmt: skip
_ENVIRONMENTS = {
    "LightningEnvironment": "local",
    "SLURMEnvironment": "slurm",
    "TorchElasticEnvironment": "torchelastic",
    "LSFEnvironment": "lsf",
    "KubeflowEnvironment": "kubeflow",
    "XLAEnvironment": "pjrt",
}
_TORCH_DEVICES = {"cpu": "cpu", "cuda": "gpu", "mps": "mps", "xla": "tpu"}


def translated(request: Request) -> Request:
    """Return ``request`` with torchhal's aliases in place of Lightning's objects.

    What Lightning's strategies hold, such as a checkpoint IO, is moved into ``plugins``.

    Raises:
        ConfigurationError: one that has no counterpart, or a subclass that changes what Lightning's class does.
    """
    plugins = as_list(request.plugins)
    accelerator, devices, strategy = request.accelerator, request.devices, request.strategy
    if _is_lightnings(strategy):
        own: Any = strategy
        strategy = _strategy(own, plugins)
        if isinstance(accelerator, str) and accelerator == "auto":
            accelerator, devices = _hardware(own, devices)
    return replace(
        request,
        accelerator=_accelerator(accelerator),
        devices=devices,
        strategy=strategy,
        precision=_precision(request.precision),
        plugins=[_plugin(each, request) for each in plugins],
    )


def as_list(value: Any) -> list[Any]:
    """Return an argument that is one object, several, or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_lightnings(value: Any) -> bool:
    return not isinstance(value, type) and any(map(trees.has, type(value).__mro__))


def _base(value: Any) -> str:
    """Return the name of the class of Lightning that ``value`` is, or whose subclass it is."""
    return next(cls.__name__ for cls in type(value).__mro__ if trees.has(cls))


def _unchanged(value: Any, argument: str, instead: str) -> str:
    """Return the name of Lightning's class, of which ``value`` is no subclass with methods of its own."""
    base = _base(value)
    changed = []
    for cls in type(value).__mro__:
        if trees.has(cls):
            break
        changed += [name for name in vars(cls) if not name.startswith(("__", "_abc_"))]
    if changed:
        raise ConfigurationError(
            f"{argument!r} can't be {type(value).__name__} under torchhal's Trainer, which would not call what it "
            f"changes of Lightning's {base}: {', '.join(changed)}. {instead}"
        )
    return base


def _strategy(value: Any, plugins: list[Any]) -> str | Mapping[str, Any]:
    base = _unchanged(
        value, "strategy", "Write a subclass of torchhal.strategies.Strategy, or of one of its strategies"
    )
    if base not in STRATEGIES:
        raise ConfigurationError(
            f"'strategy' can't be Lightning's {base}, which has no counterpart here: name one of torchhal's, which "
            "`torchhal plugins` lists"
        )
    for name in ("_precision_plugin", "_checkpoint_io", "cluster_environment"):
        part = vars(value).get(name)
        if part is not None and all(part is not each for each in plugins):
            plugins.append(part)
    alias, options, more = STRATEGIES[base](value)
    plugins += more
    return {alias: options} if options else alias


def _hardware(strategy: Any, devices: Any) -> tuple[Any, Any]:
    """Return the accelerator and the devices that a strategy of Lightning's names; "auto" where it names none."""
    accelerator = vars(strategy).get("_accelerator") or "auto"
    named = vars(strategy).get("_parallel_devices") or ()
    if _base(strategy).startswith("SingleDevice"):
        named = [getattr(strategy, "_root_device", torch.device("cpu"))]
    if named:
        if accelerator == "auto":
            accelerator = _TORCH_DEVICES.get(named[0].type, named[0].type)
        if devices == "auto":
            devices = len(named) if named[0].index is None or named[0].type == "cpu" else [each.index for each in named]
    return accelerator, devices


def _accelerator(value: Any) -> Any:
    if not _is_lightnings(value):
        return value
    base = _unchanged(value, "accelerator", "Write a subclass of torchhal.accelerators.Accelerator")
    if base not in ACCELERATORS:
        raise ConfigurationError(
            f"'accelerator' can't be {type(value).__name__}: write a subclass of torchhal.accelerators.Accelerator"
        )
    return ACCELERATORS[base]


def _precision(value: Any) -> Any:
    if not _is_lightnings(value):
        return value
    base = _unchanged(value, "precision", "Write a subclass of torchhal.precision.Precision")
    if base not in _PRECISIONS:
        raise ConfigurationError(
            f"'precision' can't be Lightning's {base}, which has no counterpart here: name one of torchhal's, which "
            "`torchhal plugins` lists"
        )
    word = str(value.precision)
    scaler = vars(value).get("scaler")
    if scaler is None or scaler.state_dict() == type(scaler)(getattr(scaler, "_device", "cpu")).state_dict():
        return word
    return {word: {"scaler": scaler}}


def _plugin(value: Any, request: Request) -> Any:
    """Return what stands for an item of ``plugins``."""
    if not _is_lightnings(value):
        return value
    bases = {cls.__name__ for cls in type(value).__mro__}
    if "CheckpointIO" in bases:
        return _checkpoint_io(value)
    if "ClusterEnvironment" in bases:
        return _cluster_environment(value, request.num_nodes)
    if "Precision" in bases:
        return _precision(value)
    if "LayerSync" in bases:
        raise ConfigurationError(f"'plugins' can't hold {type(value).__name__}: write Trainer(sync_batchnorm=True)")
    raise ConfigurationError(f"'plugins' can't hold {type(value).__name__}, which has no counterpart here")


def _checkpoint_io(value: Any) -> Any:
    name = type(value).__name__ if trees.has(type(value)) else ""
    if name == "TorchCheckpointIO":
        return "torch"
    if name == "XLACheckpointIO":
        return "xla"
    if name == "AsyncCheckpointIO":
        inner = None if value.checkpoint_io is None else _checkpoint_io(value.checkpoint_io)
        return "async" if inner in (None, "torch") else {"async": {"inner": inner}}
    return WrappedCheckpointIO(value)


def _cluster_environment(value: Any, num_nodes: Any) -> Any:
    name = type(value).__name__ if trees.has(type(value)) else ""
    if name == "MPIEnvironment":
        return "openmpi" if "OMPI_COMM_WORLD_SIZE" in os.environ else "mpich"
    if name == "SLURMEnvironment":
        options = {"requeue": bool(value.auto_requeue)}
        if value.requeue_signal is not None:
            options["requeue_signal"] = value.requeue_signal
        return {"slurm": options}
    if name in _ENVIRONMENTS:
        return _ENVIRONMENTS[name]
    return WrappedClusterEnvironment(value, num_nodes if isinstance(num_nodes, int) else 1)
