"""Give a fit with ``strategy="auto"`` its strategy, when the ranks have met and before its model is set up."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch.nn.parameter import is_lazy

from torchhal import registry
from torchhal.checkpoint._trainer_format import RUN_KEY
from torchhal.errors import ConfigurationError, InsufficientMemoryError
from torchhal.memory_estimate import bytes_of
from torchhal.resolve import Plan
from torchhal.resolve._options import replan
from torchhal.trainer import _checkpointing as checkpointing
from torchhal.trainer._auto_strategy import default_decision
from torchhal.trainer._trial import unused_copy
from torchhal.trainer.planning._batch_sizes import MOST_SAMPLES, check_source, give_batch_size
from torchhal.trainer.planning._trial_steps import why_not
from torchhal.trainer.run_state import RunState

if TYPE_CHECKING:
    from torchhal.trainer.planning._decision import Planner

T = TypeVar("T")

_NEGLIGIBLE: Final = 1 / 1000
"""Parameters of less than this share of a device's memory are not planned for: gradients, state and activations of
hundreds of times their size would fit beside them."""


def keep_base(run: RunState) -> None:
    """Keep the plan with the default strategy, which candidates replace, before a run uses any of it."""
    if run.auto is not None and run.auto.base is None:
        with suppress(ConfigurationError):  # one that can't be copied stays
            run.auto.base = run.unused = run.unused or unused_copy(run.plan)


def plan_strategy(run: RunState, ckpt_path: Any) -> None:
    """Choose the strategy of a fit, and set up its environment in place of the default one's.

    Called on every rank, when the environment of the default strategy is set up, and the hooks ``prepare_data`` and
    ``setup`` are over, but not the model's set-up. Rank 0 measures, while no process group is there, and decides, for
    the device that has least memory. Where that is nearly used up, and where the strategy is another than the default,
    two steps are tried, and a candidate that can't take them on any rank gives way to the next.

    Args:
        run: of a fit, after :func:`keep_base`.
        ckpt_path: that the fit continues from.

    Raises:
        InsufficientMemoryError: on every rank, where no candidate can fit.
    """
    assert run.auto is not None
    base = run.auto.base
    if run.auto.finds_batch_size:
        check_source(run)
    limit = None if base is None else _least_limit(run)
    if base is None or limit is None:
        if run.auto.finds_batch_size:
            run.warn_once(
                "batch_size='auto' keeps that of the loader: how much memory the devices have is not known. "
                "torchhal.tuning.find_batch_size(trainer, model, ...) tries sizes instead"
            )
        if run.auto.decision is not None:
            follow(run, default_decision(run.auto.base or run.plan))
        return
    kept = _kept_decision(run, ckpt_path) if run.strategy.is_global_zero else None
    keeps = _keep_batch_size(run, kept)
    is_zero = run.strategy.is_global_zero
    run.strategy.teardown()  # a collective in what is measured on rank 0 alone would meet none, or a wrong one
    planner, first = None, None
    if is_zero:
        planner = _make_planner(run, base, limit, keeps)
        first = _guarded(run, base, lambda: planner.decide(kept) if planner else None) or default_decision(base)
    run.strategy.setup_environment()
    decision = _agree(run, first)
    while decision["tried"] and not run.by_hand and (why := why_not(run)):
        following = None
        if planner is not None:
            again = partial(planner.decide_again, decision, why)
            following = _guarded(run, base, again) or default_decision(base)
        decision = _agree(run, following, f"{_described(run, decision)} was chosen, but {why}. ")
    if decision["name"] != base.strategy.alias and decision["reason"] not in run.said:
        run.said.add(decision["reason"])
        run.announce(f"strategy 'auto': {decision['reason']}")
    if decision["batch_size"]:
        run.announce(
            f"batch_size='auto': {decision['batch_size']} samples in each rank's batch; the learning rate is left alone"
        )


def _agree(run: RunState, mine: dict[str, Any] | None, said: str = "") -> dict[str, Any]:
    """Return rank 0's decision, which every rank follows.

    Raises:
        InsufficientMemoryError: it is that nothing fits.
    """
    decision: dict[str, Any] = mine if run.strategy.world_size == 1 else run.strategy.broadcast(mine)  # type: ignore[assignment]
    if "error" in decision:
        raise InsufficientMemoryError(f"{said}{decision['error']}")
    if said:
        run.warn_once(f"{said}{_described(run, decision)} takes its place")
    follow(run, decision)
    return decision


def _described(run: RunState, decision: Mapping[str, Any]) -> str:
    """Return what was decided, in words."""
    assert run.auto is not None
    size = decision["batch_size"]
    said = [f"strategy {decision['name']!r}"] if run.auto.request.is_auto_strategy else []
    return " with ".join([*said, *([f"a batch of {size} samples"] if size else [])])


def _least_limit(run: RunState) -> int | None:
    """Return the bytes that each device has at least; None where that isn't known, or the model needs next to nothing.

    Every rank gets the same.
    """
    strategy = run.strategy
    size = sum(map(bytes_of, _with_shapes(run.module.parameters())))
    mine = _limit(run)
    if mine is not None and size >= mine * _NEGLIGIBLE:
        gc.collect()  # what an earlier fit has left in cycles
        mine = _limit(run)
    everybody = strategy.all_gather_object((mine, size)) if strategy.world_size > 1 else [(mine, size)]
    limits = [each for each, _ in everybody if each is not None]
    if len(limits) < len(everybody):
        return None
    least, parameters = min(limits), max(size for _, size in everybody)
    assert run.auto is not None
    matters = run.auto.finds_batch_size or _builds_later(run) or parameters >= least * _NEGLIGIBLE
    return least if matters else None


def _limit(run: RunState) -> int | None:
    """Return the bytes that the run can have on this rank's device, what its model has there already included."""
    strategy = run.strategy
    try:
        available = strategy.accelerator.available_memory(strategy.root_device)
        if available is None:
            return None
        if not isinstance(available, int) or available < 0:
            raise ValueError(f"available_memory returned {available!r}")
    except Exception as error:  # of a vendor's library
        run.warn_once(
            f"nothing is planned, as accelerator {strategy.accelerator.name!r} can't say how much memory is available "
            f"({type(error).__name__}: {error})"
        )
        return None
    if strategy.root_device.type == "cpu":  # which the processes of a node share
        available //= max(1, strategy.num_local_processes(len(run.plan.device_indices)))
    tensors = {*_with_shapes(run.module.parameters()), *_with_shapes(run.module.buffers())}
    return available + sum(bytes_of(tensor) for tensor in tensors if tensor.device == strategy.root_device)


def _with_shapes(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield those that have a shape: lazy ones get it with the first batch."""
    return (tensor for tensor in tensors if not is_lazy(tensor))


def _builds_later(run: RunState) -> bool:
    """Return whether the model gets its parameters in ``configure_model``, so that their size is not known yet."""
    return (
        not run.by_hand
        and callable(getattr(run.module, "configure_model", None))
        and not any(True for _ in run.module.parameters())
    )


def _make_planner(run: RunState, base: Plan, limit: int, keeps_batch_size: bool) -> Planner | None:
    """Return what chooses; None where the model can't be measured."""
    from torchhal.trainer.planning._decision import Planner  # it imports fake tensors, which few runs need

    return _guarded(run, base, lambda: Planner(run, base, limit, keeps_batch_size=keeps_batch_size))


def _guarded(run: RunState, base: Plan, function: Callable[[], T | None]) -> T | None:
    """Return the function's result; None, with a warning, where the user's or a plugin's code fails in it."""
    try:
        return function()
    except Exception as error:  # the default strategy trains as it would without a planner
        said = " ".join(str(error).split())[:300]
        run.warn_once(
            f"strategy='auto' stays with {base.strategy.alias!r}: what a step needs is not known "
            f"({type(error).__name__}: {said})"
        )
        return None


def _keep_batch_size(run: RunState, kept: Mapping[str, Any] | None) -> bool:
    """Let the loader have the batches that the continued run had, to which a learning rate belongs.

    Called on every rank; returns whether there were any.
    """
    assert run.auto is not None
    if not run.auto.finds_batch_size:
        return False
    size = None if kept is None else kept.get("batch_size")
    mine = size if type(size) is int and 0 < size <= MOST_SAMPLES else None
    size = mine if run.strategy.world_size == 1 else run.strategy.broadcast(mine)
    if size is not None:
        give_batch_size(run, size)
    return size is not None


def _kept_decision(run: RunState, ckpt_path: Any) -> Mapping[str, Any] | None:
    """Return the decision of the run that is continued, as far as its file says; read on rank 0 alone."""
    if ckpt_path in (None, "best"):
        return None
    try:
        path = checkpointing.newest_path(run) if ckpt_path == "last" else str(ckpt_path)
        found = {} if path is None else run.strategy.checkpoint_io.open_checkpoint(path)
        kept = found[RUN_KEY]["auto"]
    except Exception:  # its load, which comes, says what is wrong with it
        return None
    return kept if isinstance(kept, Mapping) else None


def follow(run: RunState, decision: dict[str, Any], *, launched: bool = True) -> None:
    """Give the run the strategy of ``decision``.

    Args:
        run: of any rank, or of the process that has started the ranks.
        decision: of rank 0.
        launched: this process is a rank, whose environment changes with the strategy.
    """
    auto, before = run.auto, run.strategy
    assert auto is not None and auto.base is not None
    base = auto.base
    earlier = auto.decision or default_decision(base)
    auto.decision = decision
    is_default = decision["alias"] == base.strategy.alias and not decision["options"]
    if any(decision[name] != earlier[name] for name in ("alias", "options")):
        plan = unused_copy(base)
        if not is_default:
            entry = registry.find("strategy", decision["alias"])
            plan = replan(plan, auto.request, entry, decision["options"], reason=decision["reason"])
        devices, nodes = list(before.devices), before.num_nodes
        if launched:
            before.teardown()
        run.unused = unused_copy(plan)
        run.replace_plan(plan)
        run.strategy.devices, run.strategy.num_nodes = devices, nodes  # those that were left to the launcher
        if launched:
            run.strategy.setup_environment()
    if launched and decision["batch_size"]:
        give_batch_size(run, decision["batch_size"])
