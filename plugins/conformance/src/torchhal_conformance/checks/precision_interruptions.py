"""PRE: gradients of several kinds in one optimizer, steps without gradients, and steps that end in the middle."""

from __future__ import annotations

import contextlib
import copy
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from torchhal.errors import CheckpointMismatchError
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun, flatten
from torchhal_conformance.checks.precision_sequences import sparse_tensor


class _Mixture(nn.Module):
    """An embedding whose gradients may be sparse, a layer whose gradients are dense, and a parameter without any."""

    def __init__(self, sparse: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(6, 4, sparse=sparse)
        self.layer = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in (self.embedding.weight, self.layer.weight, self.layer.bias):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.embedding(rows)).float().pow(2).mean() / 16
        return found


@check("PRE-50", since="0.2", needs=["device"], after=("PRE-40",))
def several_kinds_of_gradients(context: CheckContext) -> None:
    """The global norm counts sparse and dense gradients of one optimizer together, and clips all of them alike.

    Parameters without a gradient stay without one.

    Why: two norms, one of each kind, clip a model with an embedding less than it is told to.
    Fix: clip the values of coalesced gradients together with the dense ones.
    """
    _, device = context.setup_accelerator()
    rows = torch.zeros(1, 1, dtype=torch.int64, device=device)
    sparse_tensor(rows, torch.ones(1, 2, device=device), torch.Size([2, 2]))
    for algorithm, limit in (("norm", 1e-3), ("value", 1e-3), ("norm", 1e6)):
        found: list[tuple[Any, torch.Tensor]] = []
        for sparse in (False, True):
            trained = PrecisionRun(context)
            model: Any = trained.precision.convert_module(_Mixture(sparse, context.generator())).to(trained.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with trained.precision.forward_context():
                loss = model(torch.tensor([1, 3, 1, 5], device=trained.device))
            trained.precision.backward(loss)
            trained.precision.unscale_gradients(optimizer)
            norm = trained.precision.clip_gradients(optimizer, limit, algorithm)
            require(model.unused.grad is None, "a parameter without a gradient was given one")
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            same("how many gradients there are", len(gradients), 3)
            dense = [(one.to_dense() if one.is_sparse else one).detach().cpu().double() for one in gradients]
            found.append((norm, flatten(dense)))
        (norm, expected), (norm_of_all, got) = found
        trained.near(f"dense and sparse gradients clipped by {algorithm} to {limit:g}", got, expected, 3)
        same(f"whether a norm is returned for {algorithm}", norm_of_all is None, norm is None)
        if norm is not None:
            trained.near(f"the norm of dense and sparse gradients, clipped to {limit:g},", norm_of_all, norm, 3)
            require(float(got.norm()) <= limit * (1 + 3 * trained.tolerance), f"the norm is still {float(got.norm())}")


@check("PRE-51", since="0.2", needs=["device"], after=("PRE-14",))
def no_gradients(context: CheckContext) -> None:
    """optimizer_step returns a bool, and changes no weight, where no parameter has a gradient; so does clip_gradients.

    A whole step then trains as ever.

    Why: of two optimizers one often has nothing to do, and a step that fails or counts as skipped ends the other's.
    Fix: leave the step to the optimizer where there is no gradient, and return whether it was made.
    """
    plain, trained = PrecisionRun(context), PrecisionRun(context)
    plain.step()
    before = flatten(trained.weights())
    for _ in range(2):
        trained.optimizer.zero_grad()
        trained.precision.unscale_gradients(trained.optimizer)
        trained.precision.clip_gradients(trained.optimizer, 1.0)
        answer = trained.precision.optimizer_step(trained.optimizer)
        require(type(answer) is bool, f"optimizer_step without a gradient must return a bool (got {answer!r})")
    same("the weights after steps without a gradient", flatten(trained.weights()), before)
    require(trained.step() is True, "a step after one without a gradient must return True")
    trained.near("the weights after a step", flatten(trained.weights()), flatten(plain.weights()), 2)
    same("the state", trained.precision.state_dict(), plain.precision.state_dict())


@check("PRE-52", since="0.2", needs=["device"], after=("PRE-16",))
def loaded_within_a_step(context: CheckContext) -> None:
    """A state that is loaded in the middle of a step is the state, whatever the step had found.

    The step that was begun counts no more: the next one trains as in an instance into which the state was loaded anew.
    The dictionaries that are given and returned are no part of it. An empty state, or one of another precision, changes
    nothing; the latter may be a CheckpointMismatchError.

    Why: an overflow of the step that was given up halves the scale that was restored.
    Fix: forget what was unscaled, and its result, before the state is loaded.
    """
    for overflows in (False, True):
        told = "an overflow" if overflows else "a backward"
        one, other = PrecisionRun(context), PrecisionRun(context)
        one.step()
        kept = copy.deepcopy(one.precision.state_dict())
        one.optimizer.zero_grad()
        if overflows:
            one.overflow_gradients()
        else:
            one.precision.backward(one.loss())
        one.precision.unscale_gradients(one.optimizer)
        given = copy.deepcopy(kept)
        one.precision.load_state_dict(given)
        given.clear()
        one.precision.load_state_dict({})  # of a run that had none
        same(f"the state that was loaded after {told}", one.precision.state_dict(), kept)
        other.model.load_state_dict(one.model.state_dict())
        other.precision.load_state_dict(copy.deepcopy(kept))
        for trained in (one, other):
            require(trained.step() is True, f"a good step after {told} and a load must return True")
        one.near(f"the weights after {told}, a load and a step", flatten(one.weights()), flatten(other.weights()))
        same(f"the state after {told}, a load and a step", one.precision.state_dict(), other.precision.state_dict())
        with contextlib.suppress(CheckpointMismatchError):  # another precision's
            one.precision.load_state_dict({"of another": 1})
        same("the state after a load of another precision's", one.precision.state_dict(), other.precision.state_dict())
    fresh, given = context.create(), copy.deepcopy(kept)
    fresh.load_state_dict(given)
    given.clear()
    fresh.state_dict().clear()
    same("a state that was loaded before setup()", fresh.state_dict(), kept)


@check("PRE-53", since="0.2", needs=["device"], after=("PRE-24",))
def torn_down_within(context: CheckContext) -> None:
    """teardown() inside of an entered context restores what the context changed, and leaving it changes nothing then.

    The context can be entered again afterwards. An output that is converted inside of it has the dtype that it has
    outside, however often the context was entered.

    Why: a run that an error ends tears down before its contexts are left; the default dtype is the whole process's.
    Fix: keep what was there before the first entry, and restore that; let an exit do nothing that comes later.
    """
    for name in ("forward_context", "module_init_context"):
        for levels in (1, 2):
            trained = PrecisionRun(context)
            before = torch.get_default_dtype()
            half = torch.ones(1, dtype=trained.precision.compute_dtype)
            outside = trained.precision.convert_output(half).dtype
            entered = [getattr(trained.precision, name)() for _ in range(levels)]
            for one in entered:
                one.__enter__()
            inside = torch.get_default_dtype()
            same(f"the dtype of an output in {levels} {name}()", trained.precision.convert_output(half).dtype, outside)
            trained.precision.teardown()
            told = f"after teardown() inside of {levels} {name}()"
            same(f"the default dtype {told}", torch.get_default_dtype(), before)
            for one in reversed(entered):
                one.__exit__(None, None, None)
                same(f"the default dtype {told}, and leaving", torch.get_default_dtype(), before)
            require(not torch.is_autocast_enabled(trained.device.type), f"autocast is on {told}, and leaving")
            with getattr(trained.precision, name)():
                same(f"the default dtype {told}, entered again,", torch.get_default_dtype(), inside)
            same(f"the default dtype {told}, entered and left again", torch.get_default_dtype(), before)


@check("PRE-54", since="0.2", needs=["device"], after=("PRE-09", "PRE-12"))
def gradients_of_others(context: CheckContext) -> None:
    """Gradients that were made in another way than by one backward() of the precision are right, or a RuntimeError.

    Such are those of the loss's own backward(), at first, after a whole step and after teardown(), and those to which
    another backward() adds after they were unscaled. The error comes before a weight is changed.

    Why: gradients that nobody has scaled are divided by 65536, and the run trains nothing without a word.
    Fix: remember whether backward() was called since the last step, and what was unscaled.
    """
    for when in ("at first", "after a step", "after teardown()"):
        trained = PrecisionRun(context)
        if when != "at first":
            trained.step()
            trained.precision.state_dict()  # which may end the step
        if when == "after teardown()":
            trained.optimizer.zero_grad()
            trained.precision.backward(trained.loss())
            trained.precision.teardown()
            trained.precision.setup(trained.accelerator, trained.device)
        trained.optimizer.zero_grad()
        expected = flatten(trained.reference())
        trained.loss().backward()  # type: ignore[no-untyped-call]
        try:
            trained.precision.unscale_gradients(trained.optimizer)
        except RuntimeError:
            continue
        trained.near(f"gradients of the loss's own backward {when}", flatten(trained.gradients()), expected, 3)
    trained = PrecisionRun(context)
    before, expected = flatten(trained.weights()), flatten(trained.reference())
    trained.precision.backward(trained.loss())
    trained.precision.unscale_gradients(trained.optimizer)
    try:
        trained.precision.backward(trained.loss())
        trained.precision.unscale_gradients(trained.optimizer)
    except RuntimeError:
        same("the weights after an error", flatten(trained.weights()), before)
    else:
        trained.near("the gradients of two backward passes", flatten(trained.gradients()), 2 * expected, 3)


class _Seen(torch.autograd.Function):
    """The identity, whose backward records whether autocast is on."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Seen.seen.append(torch.is_autocast_enabled(gradient.device.type))
        return gradient


class _Watched(torch.optim.SGD):
    """SGD that records whether autocast is on while it steps."""

    def step(self, closure: Any = None) -> Any:
        _Seen.seen.append(torch.is_autocast_enabled(self.param_groups[0]["params"][0].device.type))
        return super().step(closure)


@check("PRE-55", since="0.2", needs=["device"], after=("PRE-43", "PRE-47"))
def autocast_inside(context: CheckContext) -> None:
    """Inside of forward_context() the backward and the optimizer run as outside of it, and a closure inside of it.

    What the model computes there after a step is of the new weights. backward() passes its arguments on there too. The
    optimizer's own step() is the same function afterwards.

    Why: autocast keeps a cast of each weight for as long as its context lasts: the second step trains on the first's.
    Fix: leave the context around the backward and the update, and clear the cache after it.
    """
    seen: dict[bool, list[bool]] = {}
    for inside in (False, True):
        trained = PrecisionRun(context, _Watched)
        _Seen.seen = seen[inside] = []
        own = vars(trained.optimizer).get("step")
        with trained.precision.forward_context() if inside else nullcontext():
            loss: torch.Tensor = _Seen.apply(trained.loss())  # type: ignore[no-untyped-call]
            trained.precision.backward(loss, retain_graph=True)
            trained.precision.backward(loss)
            trained.precision.optimizer_step(trained.optimizer)
            same("whether the optimizer has a step of its own", vars(trained.optimizer).get("step"), own)
            found = _model_of(trained, again=not inside)
        trained.near("what the model computes after a step", found, _model_of(trained, again=True))
    same("whether autocast is on in the backward passes and the step", seen[True], seen[False])
    trained = PrecisionRun(context)
    with trained.precision.forward_context():
        expected = torch.is_autocast_enabled(trained.device.type)
        runs: list[bool] = []

        def closure() -> torch.Tensor:
            runs.append(torch.is_autocast_enabled(trained.device.type))
            trained.optimizer.zero_grad()
            loss = trained.loss()
            trained.precision.backward(loss)
            return loss

        trained.precision.optimizer_step(trained.optimizer, closure)
    same("whether autocast is on in a closure", runs, [expected])
    _closure_several_times(context)
    patched = PrecisionRun(context)
    calls: list[int] = []
    original = patched.optimizer.step

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*arguments, **options)

    vars(patched.optimizer)["step"] = counted
    for _ in range(2):
        patched.step()
    same("how often a step() that a user has replaced was called", len(calls), 2)
    require(patched.optimizer.step is counted, "a step() that a user has replaced is another one afterwards")


def _closure_several_times(context: CheckContext) -> None:
    """Check an optimizer that evaluates its closure several times, where the precision takes one."""
    weights = []
    for inside in (False, True):
        trained = PrecisionRun(context, torch.optim.LBFGS, lr=0.5, max_iter=4)
        try:
            trained.precision.check_optimizer(trained.optimizer)
        except TypeError:
            return

        def closure(trained: PrecisionRun = trained) -> torch.Tensor:
            trained.optimizer.zero_grad()
            loss = trained.loss()
            trained.precision.backward(loss)
            return loss

        with trained.precision.forward_context() if inside else nullcontext():
            trained.precision.optimizer_step(trained.optimizer, closure)
        weights.append(flatten(trained.weights()))
    trained.near("the weights after several evaluations of a closure", weights[1], weights[0])


def _model_of(trained: PrecisionRun, *, again: bool = False) -> torch.Tensor:
    """Return what the model computes; ``again`` enters a context anew for it."""
    inputs = trained.precision.convert_input(trained.batch)[0]
    with trained.precision.forward_context() if again else nullcontext():
        found: torch.Tensor = trained.model(inputs)
    return found.detach().clone()


@check("PRE-56", since="0.2")
def refused_states(context: CheckContext) -> None:
    """The error of reshard_rank_state for states that can't be shared out names both numbers of ranks.

    Why: who resumes on another number of ranks has to know the one that it would work with.
    Fix: leave the inherited reshard_rank_state, or name len(states) and world_size.
    """
    states = [{"kit": number} for number in range(7)]
    for rank in (0, 4):
        try:
            context.create().reshard_rank_state(states, rank=rank, world_size=5)
        except CheckpointMismatchError as error:
            require("7" in str(error) and "5" in str(error), f"the error must name 7 and 5 ranks (got {error})")
        except (KeyError, TypeError, ValueError) as error:  # a precision whose states are of another form
            raise NotApplicable(f"it shares out states of its own form ({type(error).__name__})") from None
    same(
        "what is shared out of empty states",
        dict(context.create().reshard_rank_state([{}] * 7, rank=4, world_size=5)),
        {},
    )
