"""STR: a strategy uses the devices, precision and checkpoint IO that it was given."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from torchhal import registry
from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import UnsupportedCombinationError
from torchhal.precision import SinglePrecision
from torchhal.resolve import Request, resolve
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import MissingRequirement, NotApplicable, check
from torchhal_conformance._rank_context import WORLD_SIZES, RankContext


@check("STR-24", world_sizes=(2,))
def given_checkpoint_io(rank: RankContext) -> None:
    """Checkpoints go through the checkpoint IO that was given, with the path and the options.

    Why: a strategy that saves by itself ignores encryption, remote storage and atomic writes.
    Fix: call self.checkpoint_io.
    """
    spy = _Spy()
    with rank.set_up_strategy(checkpoint_io=spy) as strategy:
        path = os.path.join(rank.folder, "x.ckpt")
        strategy.save_checkpoint({"a": 1}, path, storage_options={"colour": "red"})
        rank.gather("saved")
        same("what is loaded", strategy.load_checkpoint(path), {"a": 1})
        strategy.load_checkpoint(path, weights_only=False)
        rank.gather("loaded")
        strategy.remove_checkpoint(path)
    saves = [call for call in spy.calls if call[0] != "load"]
    expected = [("save", path, {"colour": "red"}), ("remove", path, None)] if rank.rank == 0 else []
    same("saves and removals that reached the checkpoint IO", saves, expected)
    loads = [call[2] for call in spy.calls if call[0] == "load"]
    same("weights_only as it reached the checkpoint IO", loads, [{"weights_only": True}, {"weights_only": False}])


class _Spy(TorchCheckpointIO):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, Any]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *, storage_options: Any = None) -> None:
        self.calls.append(("save", str(path), storage_options))
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, *, map_location: Any = "cpu", weights_only: bool = True) -> dict[str, Any]:
        self.calls.append(("load", str(path), {"weights_only": weights_only}))
        return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", str(path), None))
        super().remove_checkpoint(path)


@check("STR-27", world_sizes=WORLD_SIZES)
def own_device(rank: RankContext) -> None:
    """The root device of local rank i is the i-th device that was given.

    Why: all ranks on device 0 run, slowly, until it is full.
    Fix: index devices by local rank, not by global rank.
    """
    with rank.set_up_strategy() as strategy:
        if not strategy.multi_device or strategy.num_local_processes(len(strategy.devices)) == 1:
            same("root_device", strategy.root_device, strategy.devices[0])
        else:
            same("root_device", strategy.root_device, strategy.devices[rank.rank])
            if rank.component.make_accelerator().indexed:
                everybody = [str(device) for device in rank.gather(str(strategy.root_device))]
                same("different devices", len(set(everybody)), rank.size)


@check("STR-28", world_sizes=WORLD_SIZES, after=("STR-12",))
def sampler(rank: RankContext) -> None:
    """distributed_sampler_kwargs divide the samples: every sample on some rank, none on two but for the padding.

    Each epoch has another order. They are known before the set-up.

    Why: every rank saw the same data, and the run looked like a larger batch.
    Fix: num_replicas and rank of the data-parallel group.
    """
    early = rank.create_strategy()
    before = early.distributed_sampler_kwargs
    with rank.set_up_strategy(early) as strategy:
        kwargs = strategy.distributed_sampler_kwargs
        same("distributed_sampler_kwargs before the set-up", before, kwargs)
        everybody = rank.gather(kwargs)
        if kwargs is None:
            require(rank.size == 1 or not strategy.multi_device, "several ranks and no division of the data")
            return
        shares = []
        orders = []
        for one in everybody:
            divided: Any = DistributedSampler(range(23), **one, shuffle=True)  # type: ignore[arg-type]
            shares.append(list(divided))
            divided.set_epoch(1)
            orders.append(list(divided))
        replicas = kwargs["num_replicas"]
        ranks = sorted({one["rank"] for one in everybody})
        same("the ranks of the data", ranks, list(range(replicas)))
        union = {index for share in shares for index in share}
        same("how many of 23 samples are seen", len(union), 23)
        distinct = {tuple(share) for share in shares}
        same("how many different shares there are", len(distinct), replicas)
        require(orders != shares, "the second epoch has the order of the first")


@check("STR-36", world_sizes=(1,))
def given_precision(rank: RankContext) -> None:
    """The precision that was given converts the module and the step's input and output, and scales and steps.

    A strategy that declares ``precision_methods`` calls those of them.

    Why: a strategy with autocast of its own trains in another precision than the one that was asked for.
    Fix: call self.precision, or declare ``precision_methods`` so that precisions which override others are refused.
    """
    supported = rank.component.cls.precisions
    if supported is not None and "32-true" not in supported:
        raise NotApplicable(f"it works with {', '.join(sorted(supported))} only")
    _no_engine(rank)
    declared = rank.component.cls.precision_methods
    spy = _PrecisionSpy()
    with rank.set_up_strategy(precision=spy) as strategy:
        module = _Step()
        strategy.connect(module)
        strategy.setup_model()
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        strategy.setup_optimizers([torch.optim.SGD(parameters, lr=0.1)])
        batch = strategy.batch_to_device(torch.ones(12, 3))  # as many samples as the other checks have in a batch
        loss = strategy.step_function("training_step")(batch, 0)
        strategy.backward(loss)
        if declared is None or "clip_gradients" in declared:  # an engine that clips in its step refuses the call
            strategy.clip_gradients(strategy.optimizers[0], 1.0)
        strategy.optimizer_step(strategy.optimizers[0])
    expected = [name for name in _PrecisionSpy.NAMES if declared is None or name in declared]
    missing = [name for name in expected if name not in spy.called]
    require(not missing, f"the precision's {', '.join(missing)} was never called")


class _Step(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]


class _PrecisionSpy(SinglePrecision):
    NAMES = ("setup", "convert_module", "convert_input", "convert_output", "forward_context", "backward",
             "optimizer_step", "check_optimizer")  # fmt: skip

    def __init__(self) -> None:
        self.called: set[str] = set()

    def _spied(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.called.add(name)
        return getattr(super(), name)(*arguments, **options)


for _name in _PrecisionSpy.NAMES:

    def _method(self: Any, *arguments: Any, _name: str = _name, **options: Any) -> Any:
        return _PrecisionSpy._spied(self, _name, *arguments, **options)

    setattr(_PrecisionSpy, _name, _method)


def _no_engine(rank: RankContext) -> None:
    owned = {name for name in rank.component.declared if name.startswith("owns_")}
    if owned & {"owns_step", "owns_backward", "owns_accumulation"}:
        raise NotApplicable(f"the strategy does the step itself ({', '.join(sorted(owned))})")


@check("STR-37", world_sizes=(1,))
def unsupported_pair(rank: RankContext) -> None:
    """An accelerator or a precision that the declarations leave out is refused before a launch, naming what is missing.

    That is an accelerator outside ``accelerators`` or without what is in ``needs``, a precision that needs what is in
    ``lacks`` or overrides a method outside ``precision_methods``, and one that ``precisions``, where a class lists
    them as before, doesn't hold.

    Changed: in the message only what doesn't fit is looked for; the strategy's name in it is the core's own business.

    Why: the vendor's library fails on it after all processes have started.
    Fix: declare ``accelerators``, ``needs``, ``lacks`` and ``precision_methods``.
    """
    cls, component = rank.component.cls, rank.component
    strategy = component.create()
    needs, lacks = strategy.needs, strategy.lacks
    named = (cls.accelerators, cls.precisions, cls.precision_methods)
    if not needs and not lacks and all(declared is None for declared in named):
        raise NotApplicable("it declares that it works with everything")
    if cls.accelerators is not None and "cpu" not in cls.accelerators:
        request = Request(accelerator=CPUAccelerator(), strategy=strategy, devices=1)
        raises("a pair that can't work", UnsupportedCombinationError, partial(resolve, request), "cpu")
    alias = next(iter(cls.accelerators or ["cpu"]))
    hardware = registry.find("accelerator", alias).load()
    if not hardware.availability():
        raise MissingRequirement(f"accelerator {alias!r} is not here")

    def refused(precision: Any, mention: str, capabilities: frozenset[str] = hardware.capabilities) -> None:
        accelerator = type(hardware.__name__, (hardware,), {"capabilities": capabilities})()
        request = Request(accelerator=accelerator, strategy=component.create(), precision=precision, devices=1)
        raises("a pair that can't work", UnsupportedCombinationError, partial(resolve, request), mention)

    if cls.precisions is not None:
        others = [name for name in ("64-true", "16-true", "bf16-true") if name not in cls.precisions]
        for name in others[:1]:
            refused(name, name)
    for capability in sorted(needs):
        refused(SinglePrecision(), capability, hardware.capabilities - {capability})
    for capability in sorted(lacks):
        precision = SinglePrecision()
        precision.needs = precision.needs | {capability}
        refused(precision, capability, hardware.capabilities | {capability})
    if cls.precision_methods is not None:
        for name in sorted({"convert_input", "forward_context", "backward", "optimizer_step"} - cls.precision_methods):
            refused(_overriding(name), name)


def _overriding(name: str) -> SinglePrecision:
    """Return a precision that overrides one method."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(SinglePrecision, name)(self, *arguments, **options)

    precision: SinglePrecision = type("Overriding", (SinglePrecision,), {name: method})()
    return precision
