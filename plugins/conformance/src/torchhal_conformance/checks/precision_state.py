"""PRE: the state that each rank has of its own, and the dtypes of the optimizer's state."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.precision import Precision
from torchhal.strategies import SingleDeviceStrategy, overrides
from torchhal_conformance._assertions import plain, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun
from torchhal_conformance.checks.strategy_rank_state import check_resharding


def _own(precision: Precision) -> dict[str, Any]:
    state = precision.rank_state_dict()
    require(isinstance(state, dict), f"rank_state_dict() must return a dict (got {state!r})")
    return copy.deepcopy(state)


@check("PRE-27", since="0.2", needs=["device"])
def rank_state(context: CheckContext) -> None:
    """What rank_state_dict() returns is plain data with which another instance does the same, bit for bit.

    Why: a resumed run that rounds with other random numbers isn't the run that was interrupted.
    Fix: put all that changes and may differ between ranks into rank_state_dict(), and restore it in
    load_rank_state_dict.
    """
    one = PrecisionRun(context)
    for _ in range(2):
        one.step()
    kept = _own(one.precision)
    if not kept:
        raise NotApplicable("the precision has no per-rank state")
    plain("rank_state_dict()", kept)
    other = PrecisionRun(context)
    other.model.load_state_dict(one.model.state_dict())
    other.precision.load_state_dict(copy.deepcopy(one.precision.state_dict()))
    other.precision.load_rank_state_dict(copy.deepcopy(kept))
    same("rank_state_dict() after it was loaded", _own(other.precision), kept)
    for trained in (one, other):
        for _ in range(2):
            trained.step()
    same("the weights after two more steps", other.weights(), one.weights())
    same("rank_state_dict() after two more steps", _own(other.precision), _own(one.precision))


@check("PRE-28", since="0.2", needs=["device"])
def resharded_rank_state(context: CheckContext) -> None:
    """reshard_rank_state shares the states of 2 ranks out to 1 or 3, or raises CheckpointMismatchError.

    The error names the precision and both numbers of ranks. Without per-rank state there is nothing to refuse.

    Why: a rank that is new gets an IndexError in the midst of a resume, or no error and another's state.
    Fix: leave reshard_rank_state out, whose default refuses, or return a state for every rank.
    """
    one = PrecisionRun(context)
    one.step()
    states = [_own(one.precision)]
    one.step()
    states.append(_own(one.precision))
    check_resharding(one.precision, states, lambda: _own(one.precision))


@check("PRE-30", since="0.2", needs=["device"])
def optimizer_state_dtype(context: CheckContext) -> None:
    """An optimizer steps with its state in the dtypes of optimizer_state_dtype, and a resume keeps every digit of it.

    Why: a precision that asks for float32 moments and steps as torch does raises in its second step.
    Fix: make steps that combine dtypes in optimizer_step, and return a floating-point dtype or None.
    """
    accelerator, device = context.setup_accelerator()

    def made() -> tuple[SingleDeviceStrategy, Any]:
        strategy, precision = SingleDeviceStrategy(), context.create()
        precision.setup(accelerator, device)
        strategy.configure(
            accelerator=accelerator, precision=precision, checkpoint_io=TorchCheckpointIO(), cluster_environment=None,
            devices=[device], num_nodes=1,
        )  # fmt: skip
        torch.default_generator.manual_seed(context.component.seed)
        strategy.connect(torch.nn.Linear(4, 3))
        strategy.setup_model()
        assert strategy.module is not None
        strategy.setup_optimizers([torch.optim.Adam(strategy.module.parameters(), lr=0.1, eps=1e-4)])
        return strategy, strategy.optimizers[0]

    def step(strategy: SingleDeviceStrategy, optimizer: Any) -> None:
        assert strategy.module is not None
        optimizer.zero_grad()
        for parameter in strategy.module.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).to(parameter).view_as(parameter)
        strategy.optimizer_step(optimizer)

    strategy, optimizer = made()
    if not overrides(strategy.precision, Precision, "optimizer_state_dtype"):
        raise NotApplicable("the precision leaves the dtypes of the optimizer's state to torch")
    for number in (1, 2):
        try:
            step(strategy, optimizer)
        except Exception as error:
            raise CheckFailed(f"step {number} of Adam raised {type(error).__name__}: {error}") from error
        for parameter, entry in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                dtype = strategy.precision.optimizer_state_dtype(parameter, name)
                require(
                    dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
                    f"optimizer_state_dtype must return a floating-point dtype or None (got {dtype!r})",
                )
                if dtype is not None:
                    same(f"dtype of {name!r} after step {number}", entry[name].dtype, dtype)
    saved = copy.deepcopy(strategy.optimizer_state(optimizer))
    other, loaded = made()
    other.load_optimizer_state(loaded, copy.deepcopy(saved))
    for name in ("exp_avg", "exp_avg_sq"):
        for one, two in zip(optimizer.state.values(), loaded.state.values(), strict=True):
            same(f"{name!r} after a load", (two[name].dtype, two[name].tolist()), (one[name].dtype, one[name].tolist()))
