"""PRE: gradients are scaled, unscaled and clipped exactly once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun, flatten, total_norm


@check("PRE-09", needs=["device"])
def gradients(context: CheckContext) -> None:
    """After backward() every gradient is one scale times the true one, and after unscale_gradients() the true one.

    That holds in every parameter group. backward() hands its further arguments on.

    Why: a scale that is applied twice, or never taken away, is a learning rate that is 65536 times too large.
    Fix: scale the loss in backward() and nowhere else.
    """
    trained = PrecisionRun(context)
    reference = flatten(trained.reference())
    trained.precision.backward(trained.loss())
    got = flatten(trained.gradients())
    scale = float(got @ reference / (reference @ reference))
    require(scale > 0.5, f"after backward() gradients are {scale:.3g} times the true ones")
    trained.near(f"gradients after backward(), divided by the scale {scale:.6g}", got / scale, reference)
    trained.precision.unscale_gradients(trained.optimizer)
    trained.near("gradients after unscale_gradients()", flatten(trained.gradients()), reference)
    _two_groups(context)
    _further_arguments(context)


def _two_groups(context: CheckContext) -> None:
    """Check the gradients of two parameter groups, and of a model with frozen, tied and unused parameters."""
    trained = PrecisionRun(context)
    reference = flatten(trained.reference())
    optimizer = torch.optim.SGD(
        [{"params": [trained.model.weight], "momentum": 0.5}, {"params": [trained.model.bias], "lr": 0.1}], lr=1.0
    )
    trained.precision.backward(trained.loss())
    trained.precision.unscale_gradients(optimizer)
    trained.near("gradients of two parameter groups after unscale_gradients()", flatten(trained.gradients()), reference)


def _further_arguments(context: CheckContext) -> None:
    """Check that backward hands its further arguments on, to loss.backward and to ``through``."""
    trained = PrecisionRun(context)
    reference = trained.reference()
    loss = trained.loss()
    trained.precision.backward(loss, retain_graph=True)
    scale = float(flatten(trained.gradients()) @ flatten(reference)) / float(flatten(reference) @ flatten(reference))
    try:
        trained.precision.backward(loss)
    except RuntimeError as error:
        raise CheckFailed(f"backward(loss, retain_graph=True) freed the graph ({error})") from error
    trained.near("gradients after two backward passes, over two", flatten(trained.gradients()) / 2 / scale,
                 flatten(reference))  # fmt: skip
    trained.optimizer.zero_grad()
    trained.precision.backward(trained.loss(), inputs=[trained.model.bias])
    require(trained.model.weight.grad is None, "backward(loss, inputs=[bias]) gave another parameter a gradient")
    seen: list[Any] = []

    def through(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        loss.backward()  # type: ignore[no-untyped-call]

    trained.optimizer.zero_grad()
    trained.precision.backward(trained.loss(), 3, through=through, word="x")
    same("what backward handed on to 'through'", seen, [((3,), {"word": "x"})])
    trained.near("gradients of a backward through a function", flatten(trained.gradients()) / scale, flatten(reference))


@check("PRE-10", needs=["device"], after=("PRE-09",))
def clip_by_norm(context: CheckContext) -> None:
    """Clipped by norm, the update has the smaller one of the limit and the gradient's norm.

    The norm before clipping is returned.

    Why: clipping before unscaling shrinks every gradient to nothing, and the loss still goes down a little.
    Fix: unscale first.
    """
    norm = total_norm(PrecisionRun(context).reference())
    for limit, expected in ((norm / 10, norm / 10), (norm * 10, norm)):
        trained = PrecisionRun(context)
        trained.precision.backward(trained.loss())
        returned = trained.precision.clip_gradients(trained.optimizer, limit, "norm")
        trained.precision.optimizer_step(trained.optimizer)
        what = f"norm of the update, of a gradient of norm {norm:.4g} clipped to {limit:.4g},"
        close(
            f"{what} relative to the expected",
            total_norm(trained.weights()) / expected,
            1.0,
            max(trained.tolerance, 1e-4),
        )
        require(returned is not None, "clip_gradients by norm returned no norm")
        close("the norm that clip_gradients returned, relative", float(returned) / norm, 1.0, trained.tolerance)  # type: ignore[arg-type]
    _clip_groups(context, norm)


def _clip_groups(context: CheckContext, norm: float) -> None:
    """Check the norm over two groups, beside parameters without a gradient, and of gradients that are zero."""
    trained = PrecisionRun(context)
    weight, bias = trained.model.weight, trained.model.bias
    unused = nn.Parameter(torch.ones_like(bias))
    frozen = nn.Parameter(torch.ones_like(bias), requires_grad=False)
    groups: list[dict[str, Any]] = [{"params": [weight, unused]}, {"params": [bias, frozen], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    trained.precision.backward(trained.loss())
    returned: Any = trained.precision.clip_gradients(optimizer, norm / 10, "norm")
    what = f"the norm of a gradient of norm {norm:.4g} in two parameter groups, clipped to {norm / 10:.4g},"
    tolerance = max(trained.tolerance, 1e-4)
    close(f"{what} relative to the limit", total_norm(trained.gradients()) / (norm / 10), 1.0, tolerance)
    close("the norm that clip_gradients returned for two groups, relative", float(returned) / norm, 1.0, tolerance)
    require(unused.grad is None and frozen.grad is None, "clip_gradients gave a gradient to a parameter without one")
    optimizer.zero_grad()
    trained.precision.backward(trained.loss() * 0.0)
    returned = trained.precision.clip_gradients(optimizer, 1.0, "norm")
    close("gradients of zero after clipping", flatten(trained.gradients()), torch.zeros(15), 0.0)
    close("the norm of gradients of zero", returned, 0.0, 0.0)


@check("PRE-11", needs=["device"], after=("PRE-09",))
def clip_by_value(context: CheckContext) -> None:
    """Clipped by value, each entry of the update is the gradient's, cut at the limit.

    An unknown algorithm is a ValueError that names it.

    Why: an algorithm argument that is ignored clips otherwise than the paper says.
    Fix: branch on it, and refuse the rest.
    """
    trained = PrecisionRun(context)
    reference = flatten(trained.reference())
    limit = float(reference.abs().median())
    trained.step(clip=(limit, "value"))
    trained.near("the update", -flatten(trained.weights()), reference.clamp(-limit, limit))
    for order in (("weight", "bias"), ("bias", "weight")):
        trained = PrecisionRun(context)
        groups = [{"params": [getattr(trained.model, name)]} for name in order]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        trained.precision.backward(trained.loss())
        require(
            trained.precision.clip_gradients(optimizer, limit, "value") is None, "clipping by value must return None"
        )
        clipped = flatten(trained.gradients())
        trained.near(f"gradients in groups of {order}, clipped by value", clipped, reference.clamp(-limit, limit))
    unknown = PrecisionRun(context)
    unknown.precision.backward(unknown.loss())
    raises(
        "clipping by 'luck'",
        ValueError,
        lambda: unknown.precision.clip_gradients(unknown.optimizer, 1.0, "luck"),
        "luck",
    )


@check("PRE-12", needs=["device"], after=("PRE-09",))
def unscale_once(context: CheckContext) -> None:
    """However often gradients are unscaled and clipped in a step, they are unscaled once.

    Why: logging the norm and clipping both unscale; the second time the gradient is gone.
    Fix: remember for which optimizer it was done since its last step.
    """
    trained = PrecisionRun(context)
    reference = trained.reference()
    for _ in range(2):  # the second step too: what was remembered must be forgotten
        trained.optimizer.zero_grad()
        start = trained.weights()
        reference = trained.reference()
        trained.precision.backward(trained.loss())
        for _ in range(3):
            trained.precision.unscale_gradients(trained.optimizer)
        trained.precision.clip_gradients(trained.optimizer, 1e6)
        trained.near("gradients unscaled three times", flatten(trained.gradients()), flatten(reference))
        trained.precision.optimizer_step(trained.optimizer)
        update = flatten(start) - flatten(trained.weights())
        trained.near("the update", update, flatten(reference), 2)


@check("PRE-22", needs=["device"])
def main_params(context: CheckContext) -> None:
    """main_params yields each parameter of an optimizer exactly once, over all of its groups.

    Why: what is yielded twice is clipped twice, and what is left out never.
    Fix: go through param_groups and remember ids.
    """
    trained = PrecisionRun(context)
    weight, bias = trained.model.weight, trained.model.bias
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    optimizer.param_groups[1]["params"].append(weight)  # a tied one, as a list of names may bring it twice
    for grads in ("without gradients", "with gradients", "after one lost its gradient"):
        found = [id(parameter) for parameter in trained.precision.main_params(optimizer)]
        counts = sorted(found.count(id(one)) for one in (weight, bias))
        same(f"how often each parameter was yielded {grads}", counts, [1, 1])
        same(f"how many parameters were yielded {grads}", len(found), 2)
        if grads == "without gradients":
            trained.precision.backward(trained.loss())
        bias.grad = None if grads == "with gradients" else bias.grad
