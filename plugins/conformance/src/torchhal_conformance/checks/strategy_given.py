"""STR-69, STR-98, STR-99: what a strategy is constructed with, and what it has between set-up and teardown."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import TorchElasticEnvironment
from torchhal.errors import ConfigurationError
from torchhal.precision import SinglePrecision
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import Regression, batch, running, share


class _Refuses(TorchElasticEnvironment):
    """An environment whose job has another size than was requested."""

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        raise ConfigurationError("the job has another size")


@check("STR-98", since="0.2", world_sizes=(1, 2))
def components_of_the_constructor(rank: RankContext) -> None:
    """Components that the constructor is given are the strategy's, and are in ``given``.

    ``precision`` and ``precision_plugin`` are one argument: both may name one object, two objects are a
    ConfigurationError. An argument that is no such component is a TypeError with its name. checkpoint_io may be set.
    An environment that refuses the job's size is heard before the set-up has ended.

    Why: a precision that the user gave to the strategy was replaced by the default, and nobody was told.
    Fix: pass the parts on to Strategy.__init__.
    """
    create, kinds = rank.component.create, inspect.Parameter
    parameters = inspect.signature(rank.component.cls.__init__).parameters.values()
    if not any(one.kind is kinds.VAR_KEYWORD or one.name == "precision" for one in parameters):
        raise NotApplicable("its constructor takes no components")
    one = SinglePrecision()
    parts: dict[str, Any] = {
        "accelerator": rank.component.make_accelerator(),
        "precision": one,
        "checkpoint_io": TorchCheckpointIO(),
        "cluster_environment": TorchElasticEnvironment(),
    }
    strategy = create(**parts)
    for name, part in parts.items():
        require(getattr(strategy, name) is part, f"{name} is not what the constructor was given")
        require(strategy.given.get(name) is part, f"given[{name!r}] is not what the constructor was given")
        raises(f"{name}=object()", TypeError, lambda name=name: create(**{name: object()}), name)  # type: ignore[misc]
    require(strategy.precision_plugin is one, "precision_plugin is not the precision")
    for told, same_one in (("precision_plugin", {}), ("both names", {"precision": one})):
        other = create(precision_plugin=one, **same_one)
        require(other.precision is one, f"a precision that was given by {told} is not the strategy's")
        require(other.given["precision"] is one, f"a precision that was given by {told} is not in given")
    raises("two precisions", ConfigurationError, lambda: create(precision=one, precision_plugin=SinglePrecision()))
    strategy.checkpoint_io = io = TorchCheckpointIO()
    require(strategy.checkpoint_io is io, "checkpoint_io is not the one that was set")
    if rank.component.cls.multi_device:
        _environment_is_heard(rank)


def _environment_is_heard(rank: RankContext) -> None:
    strategy = rank.create_strategy()
    strategy.cluster_environment = _Refuses()
    if not isinstance(getattr(strategy, "environment", None), _Refuses):
        return  # it starts no processes, or has an environment of its own

    def start() -> None:
        strategy.make_launcher()
        strategy.setup_environment()

    try:
        raises("a job of another size than was requested", ConfigurationError, start, "the job has another size")
    finally:
        strategy.teardown()


@check("STR-99", since="0.2", world_sizes=(1, 2))
def attributes_of_a_run(rank: RankContext) -> None:
    """``watch`` is of this rank alone before the set-up and after the teardown, and of all ranks between them.

    Also if it was read before. ``mark_step`` is None without a step marker, ``trainer`` in a loop without a Trainer.
    Before configure() ranks are 0 in a job of one process, whose size is 1, and components that the constructor was not
    given are a ConfigurationError, as is root_device.

    Why: a callback that looked at the monitor in its constructor left the run without one: no rank heard of another
    one's failure.
    Fix: replace the monitor of one rank in setup_environment(); set ``_watch`` nowhere.
    """
    _before_configure(rank)
    strategy = rank.create_strategy()

    def look(when: str, ranks: int) -> None:
        same(f"the number of ranks that are watched {when}", strategy.watch.world_size, ranks)
        for name in ("trainer", "mark_step"):
            require(getattr(strategy, name) is None, f"{name} is not None {when}")

    vars(strategy.accelerator)["step_marker"] = lambda: None
    look("before the set-up", 1)
    with rank.set_up_strategy(strategy):
        look("after the set-up", strategy.world_size)
        rank.gather("looked")
    look("after the teardown", 1)


def _before_configure(rank: RankContext) -> None:
    strategy = rank.component.create()
    if rank.size == 1:
        numbers = (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size)
        same("global, local and node rank, and world_size, of one process before configure()", numbers, (0, 0, 0, 1))
    names = [name for name in ("accelerator", "precision", "checkpoint_io") if strategy.given[name] is None]
    for name in (*names, "root_device"):
        raises(f"{name} before configure()", ConfigurationError, lambda name=name: getattr(strategy, name))  # type: ignore[misc]


class _Evaluated(Regression):
    """Model that is evaluated too."""

    def validation_step(self, batch: Any, batch_idx: int) -> tuple[str, torch.Tensor]:
        return "evaluated", self.training_step(batch, batch_idx)


class _Manual(_Evaluated):
    automatic_optimization = False


@check("STR-69", since="0.2", world_sizes=(1, 2))
def step_marks(rank: RankContext) -> None:
    """The accelerator's step marker is called after each backward, after each optimizer step, after each evaluation.

    And after a training step with manual optimization. What the steps return is what the module's own return.

    Why: a lazy device records all batches of a validation in one graph, and runs out of memory.
    Fix: call ``mark_step`` in these places where it isn't None; return the step's output.
    """
    for kind in (_Evaluated, _Manual):
        marks: list[int] = []
        strategy = rank.create_strategy()
        if strategy.accelerators is not None and "cpu" not in strategy.accelerators:
            raise NotApplicable("a strategy of the hardware's own may choose other places")
        vars(strategy.accelerator)["step_marker"] = lambda marks=marks: lambda: marks.append(1)
        with running(rank, kind(), strategy=strategy, may_refuse=kind is _Manual) as run:
            require(strategy.mark_step is not None, "mark_step is not what step_marker() has returned")
            data = share(strategy, batch(rank, 0))
            evaluated = strategy.step_function("validation_step")
            if not strategy.evaluation_communicates:
                marks.clear()
                with torch.no_grad():
                    output = evaluated(data, 0)
                same("the type of what the validation step returns", type(output), tuple)
                same("what the validation step returns", output[0], "evaluated")
                require(marks, "no mark after a validation step")
            marks.clear()
            loss = run.step(data, 0)
            require(isinstance(loss, torch.Tensor), f"the training step returns {loss!r} in place of the loss")
            if kind is _Manual:
                require(marks, "no mark after a training step with manual optimization")
                return
            marks.clear()
            strategy.backward(loss)
            require(marks, "no mark after backward")
            marks.clear()
            strategy.optimizer_step(run.optimizer)
            require(marks, "no mark after optimizer_step")
        require(strategy.mark_step is None, "mark_step is still set after teardown()")
