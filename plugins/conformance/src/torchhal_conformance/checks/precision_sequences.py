"""PRE: orders of calls that a training step of the user's own may make, and gradients that are not dense."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun, flatten, total_norm


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a sparse tensor on the device of its values.

    Raises:
        NotApplicable: the device has none.
    """
    try:
        made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
        made.coalesce()
    except (NotImplementedError, RuntimeError) as error:
        raise NotApplicable(f"the device has no sparse tensors ({error})") from None
    return made


@check("PRE-40", since="0.2", needs=["device"])
def sparse_gradients(context: CheckContext) -> None:
    """clip_gradients clips sparse gradients in place as it clips dense ones, by norm and by value.

    Why: torch's own clip_grad_norm_ raises for a sparse gradient, so embeddings of that kind could not be clipped.
    Fix: clip the values of a coalesced gradient.
    """
    trained = PrecisionRun(context)
    for algorithm, limit in (("norm", 1e-3), ("value", 1e-3)):
        gradients = []
        for sparse in (False, True):
            model: Any = trained.precision.convert_module(nn.Embedding(6, 4, sparse=sparse)).to(trained.device)
            rows = torch.tensor([1, 3, 1], device=trained.device)
            weight = model.weight
            values = torch.arange(12, dtype=torch.float32, device=trained.device).reshape(3, 4).to(weight.dtype) / 8
            if sparse:
                weight.grad = sparse_tensor(rows[None], values, weight.shape)
            else:
                weight.grad = torch.zeros_like(weight).index_add_(0, rows, values)
            optimizer = torch.optim.SGD([weight], lr=1.0)
            if trained.scale() != 1 and not sparse:
                raise NotApplicable("this precision scales the loss: only its own backward makes gradients")
            trained.precision.clip_gradients(optimizer, limit, algorithm)
            gradients.append(weight.grad.to_dense().detach().cpu().double())
        dense, clipped = gradients
        trained.near(f"a sparse gradient clipped by {algorithm}", clipped, dense, 3)
        require(float(clipped.abs().max()) <= 1.1 * limit, f"a sparse gradient was not clipped by {algorithm}")


@check("PRE-41", since="0.2", needs=["device"])
def shared_parameters(context: CheckContext) -> None:
    """main_params yields a parameter once that is in two groups of an optimizer.

    Why: what is yielded twice counts twice in the norm.
    Fix: remember the ids of what was yielded.
    """
    trained = PrecisionRun(context)
    weight = trained.model.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [weight]})
    found = [id(one) for one in trained.precision.main_params(optimizer)]
    same("how often a parameter of two groups was yielded", len(found), 1)


@check("PRE-42", since="0.2", needs=["device"])
def backward_arguments(context: CheckContext) -> None:
    """backward() passes its arguments on, and calls ``through`` with them in place of the loss's own backward.

    Why: retain_graph that is lost is an error in the second backward of a step, far away from its cause.
    Fix: pass *args and **kwargs on, with the scaled loss.
    """
    trained = PrecisionRun(context)
    reference = flatten(trained.reference())
    loss = trained.loss()
    trained.precision.backward(loss, retain_graph=True)
    trained.precision.backward(loss)
    trained.precision.unscale_gradients(trained.optimizer)
    trained.near("the gradients of two backward passes", flatten(trained.gradients()), 2 * reference, 3)
    trained.optimizer.zero_grad()
    calls: list[Any] = []

    def through(scaled: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))
        scaled.backward()  # type: ignore[no-untyped-call]

    fresh = PrecisionRun(context)
    fresh.precision.backward(fresh.loss(), 1, through=through, key=2)
    same("what 'through' was called with", calls, [((1,), {"key": 2})])
    fresh.precision.unscale_gradients(fresh.optimizer)
    fresh.near("the gradients through a function", flatten(fresh.gradients()), reference, 3)


@check("PRE-43", since="0.2", needs=["device"])
def inside_the_step(context: CheckContext) -> None:
    """backward, clip_gradients and optimizer_step do inside of forward_context() what they do outside of it.

    Why: with manual optimization the whole step runs inside; a backward under autocast computes in another width.
    Fix: leave the context around the backward and the update.
    """
    inside, outside = PrecisionRun(context), PrecisionRun(context)
    for _ in range(2):
        norms = []
        for trained in (inside, outside):
            trained.optimizer.zero_grad()
            norms.append(_clipped_step(trained, within=trained is inside))
        inside.near("the norm before clipping", norms[0], norms[1])
        inside.near("the weights", flatten(inside.weights()), flatten(outside.weights()))
    same("the state", inside.precision.state_dict(), outside.precision.state_dict())


def _clipped_step(trained: PrecisionRun, within: bool) -> Any:
    loss = trained.loss()
    if not within:
        return apply_clipped(trained, loss)
    with trained.precision.forward_context():
        return apply_clipped(trained, loss)


def apply_clipped(trained: PrecisionRun, loss: torch.Tensor) -> Any:
    """Run the backward of ``loss``, clip its gradients and step; return the norm before the clipping."""
    trained.precision.backward(loss)
    trained.precision.unscale_gradients(trained.optimizer)
    norm = trained.precision.clip_gradients(trained.optimizer, 1e-3)
    require(trained.precision.optimizer_step(trained.optimizer) is True, "a good step must return True")
    return norm


@check("PRE-44", since="0.2", needs=["device"])
def state_before_setup(context: CheckContext) -> None:
    """A state that is loaded before setup() is the state after it, and before it already.

    Why: a scale that is restored too early starts anew, and the resumed run skips steps.
    Fix: keep a state that comes before there is something to load it into.
    """
    one = PrecisionRun(context)
    one.step()
    one.overflow_gradients()
    one.precision.optimizer_step(one.optimizer)
    kept = copy.deepcopy(one.precision.state_dict())
    other = context.create()
    other.load_state_dict(copy.deepcopy(kept))
    same("the state before setup()", other.state_dict(), kept)
    accelerator, device = context.setup_accelerator()
    other.setup(accelerator, device)
    same("the state after setup()", other.state_dict(), kept)
    other.teardown()
    other.setup(accelerator, device)
    same("the state after another setup()", other.state_dict(), kept)


@check("PRE-45", since="0.2", needs=["device"])
def declared_scaling(context: CheckContext) -> None:
    """A precision has "scales_loss" in ``features`` exactly if backward() scales the loss.

    Why: a strategy whose ranks have different gradients would skip a step on one rank alone.
    Fix: declare it where the loss is scaled, on the object.
    """
    trained = PrecisionRun(context)
    scales = abs(trained.scale() - 1) > 1e-2
    same("whether 'scales_loss' is declared", "scales_loss" in trained.precision.features, scales)


@check("PRE-46", since="0.2", needs=["device"])
def two_losses(context: CheckContext) -> None:
    """The backward of a second loss leaves the unscaled gradients of another optimizer alone.

    Why: a GAN's two losses belong to two optimizers, whose steps come after both backward passes.
    Fix: keep what is unscaled per optimizer until it has stepped.
    """
    trained = PrecisionRun(context)
    weight, bias = trained.model.weight, trained.model.bias
    reference = trained.reference()
    first, second = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([bias], lr=1.0)
    bias.requires_grad_(False)
    trained.precision.backward(trained.loss())
    trained.precision.unscale_gradients(first)
    trained.precision.clip_gradients(first, 1e6)
    bias.requires_grad_(True)
    weight.requires_grad_(False)
    trained.precision.backward(trained.loss())
    trained.near("the first optimizer's gradient after the second backward", weight.grad, reference[0], 2)
    require(trained.precision.optimizer_step(second) is True, "the second optimizer was not stepped")
    require(trained.precision.optimizer_step(first) is True, "the first optimizer was not stepped")
    trained.near("the first optimizer's update", -weight, reference[0], 2)
    trained.near("the second optimizer's update", -bias, reference[1], 2)
    require(total_norm(trained.weights()) > 0, "nothing was trained")
    close("what was not trained twice", trained.weights()[0].isfinite().all().double(), torch.tensor(1.0), 0.0)


@check("PRE-47", since="0.2", needs=["device"])
def closure_of_a_step(context: CheckContext) -> None:
    """optimizer_step runs the closure once for an optimizer that needs it once, with gradients on, and then steps.

    That holds inside of forward_context() and of torch.no_grad() too.

    Why: a closure that isn't run trains nothing, and one that runs twice trains on two batches.
    Fix: pass it to optimizer.step, or run it before the step.
    """
    plain = PrecisionRun(context)
    plain.optimizer.zero_grad()
    plain.step()
    for where in ("outside", "inside of forward_context()", "inside of torch.no_grad()"):
        trained = PrecisionRun(context)
        runs: list[int] = []

        def closure(trained: PrecisionRun = trained, runs: list[int] = runs) -> torch.Tensor:
            runs.append(1)
            trained.optimizer.zero_grad()
            loss = trained.loss()
            trained.precision.backward(loss)
            return loss

        inside = trained.precision.forward_context() if "forward" in where else nullcontext()
        with inside, torch.no_grad() if "no_grad" in where else nullcontext():
            answer = trained.precision.optimizer_step(trained.optimizer, closure)
        same(f"how often the closure ran {where}", len(runs), 1)
        require(answer is True, f"optimizer_step with a closure must return True {where} (got {answer!r})")
        trained.near(f"the weights {where}", flatten(trained.weights()), flatten(plain.weights()), 2)
