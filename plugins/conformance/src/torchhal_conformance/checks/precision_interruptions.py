"""PRE: gradients of several kinds in one optimizer, steps without gradients, and steps that end in the middle."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun, flatten


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


@check("PRE-50", level="provisional", since="0.2", needs=["device"], after=("PRE-40",))
def several_kinds_of_gradients(context: CheckContext) -> None:
    """The global norm counts sparse and dense gradients of one optimizer together, and clips all of them alike.

    Parameters without a gradient stay without one.

    Why: two norms, one of each kind, clip a model with an embedding less than it is told to.
    Fix: clip the values of coalesced gradients together with the dense ones.
    """
    _, device = context.setup_accelerator()
    try:
        rows = torch.zeros(1, 1, dtype=torch.int64, device=device)
        torch.sparse_coo_tensor(rows, torch.ones(1, 2, device=device), (2, 2), check_invariants=False).coalesce()
    except (NotImplementedError, RuntimeError) as error:
        raise NotApplicable(f"the device has no sparse tensors ({error})") from None
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


@check("PRE-51", level="provisional", since="0.2", needs=["device"], after=("PRE-14",))
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


@check("PRE-52", level="provisional", since="0.2", needs=["device"], after=("PRE-16",))
def loaded_within_a_step(context: CheckContext) -> None:
    """A state that is loaded in the middle of a step is the state, whatever the step had found.

    The step that was begun counts no more: the next one trains as in an instance into which the state was loaded anew.

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
        one.precision.load_state_dict(copy.deepcopy(kept))
        same(f"the state that was loaded after {told}", one.precision.state_dict(), kept)
        other.model.load_state_dict(one.model.state_dict())
        other.precision.load_state_dict(copy.deepcopy(kept))
        for trained in (one, other):
            require(trained.step() is True, f"a good step after {told} and a load must return True")
        one.near(f"the weights after {told}, a load and a step", flatten(one.weights()), flatten(other.weights()))
        same(f"the state after {told}, a load and a step", one.precision.state_dict(), other.precision.state_dict())


@check("PRE-53", level="provisional", since="0.2", needs=["device"], after=("PRE-24",))
def torn_down_within(context: CheckContext) -> None:
    """teardown() inside of an entered context restores what the context changed, and leaving it changes nothing then.

    The context can be entered again afterwards.

    Why: a run that an error ends tears down before its contexts are left; the default dtype is the whole process's.
    Fix: keep what was there before the first entry, and restore that; let an exit do nothing that comes later.
    """
    for name in ("forward_context", "module_init_context"):
        for levels in (1, 2):
            trained = PrecisionRun(context)
            before = torch.get_default_dtype()
            entered = [getattr(trained.precision, name)() for _ in range(levels)]
            for one in entered:
                one.__enter__()
            inside = torch.get_default_dtype()
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
