"""PRE: optimizer steps, their overflows, and the state that a resumed run continues from."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from torchhal.precision import Precision
from torchhal.pytree import move_module
from torchhal_conformance._assertions import close, plain, require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._precision_run import PrecisionRun, flatten, total_norm

CURVE = {torch.float64: 1e-4, torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.1}


@check("PRE-13", needs=["device"])
def overflow(context: CheckContext) -> None:
    """With an infinite or NaN gradient the weights stay, the scale falls, and the next good step is made.

    Why: one step with an infinity ends a run; a scale that never falls ends it too.
    Fix: look at the unscaled gradients before the optimizer does, and update the scale.
    """
    trained = PrecisionRun(context)
    trained.require_scaling()
    scale, before = trained.scale(), trained.weights()
    trained.overflow_gradients()
    trained.precision.unscale_gradients(trained.optimizer)
    trained.precision.optimizer_step(trained.optimizer)
    same("the weights after a step with infinite gradients", trained.weights(), before)
    trained.optimizer.zero_grad()
    require(trained.scale() < scale, f"the scale is {trained.scale():.6g}, it was {scale:.6g} before the overflow")
    trained.step()
    require(total_norm(trained.weights()) > 0, "the good step after an overflow was not made")
    require(bool(torch.isfinite(flatten(trained.weights())).all()), "the weights are not finite")


@check("PRE-14", needs=["device"], after=("PRE-13",))
def skipped_step(context: CheckContext) -> None:
    """optimizer_step answers True when the weights were updated, and False when the step was skipped.

    Why: a scheduler that advances on skipped steps decays the rate for nothing.
    Fix: return what happened.
    """
    trained = PrecisionRun(context)
    require(trained.step() is True, "optimizer_step of a good step must answer True")
    trained.require_scaling()
    trained.optimizer.zero_grad()
    trained.overflow_gradients()
    answer = trained.precision.optimizer_step(trained.optimizer)
    require(answer is False, f"optimizer_step of a skipped step must answer False (got {answer!r})")


@check("PRE-15", needs=["device"], after=("PRE-09",))
def accumulation(context: CheckContext) -> None:
    """Four micro-batches make the step of one batch, and the state changes once per optimizer step.

    Why: a scale that follows each backward is another one at the end of an accumulation than at its start.
    Fix: update in optimizer_step.
    """
    whole, parts = PrecisionRun(context), PrecisionRun(context)
    for _ in range(2):
        whole.step()
        parts.optimizer.zero_grad()
        for rows in range(0, 8, 2):
            parts.precision.backward(parts.loss([tensor[rows : rows + 2] for tensor in parts.batch]) / 4)
        parts.precision.unscale_gradients(parts.optimizer)
        parts.precision.optimizer_step(parts.optimizer)
        same("the state after a step of four micro-batches", parts.precision.state_dict(), whole.precision.state_dict())
        whole.near("the weights", flatten(parts.weights()), flatten(whole.weights()), 3)


@check("PRE-16", needs=["device"])
def state(context: CheckContext) -> None:
    """A precision that continues from another one's state does the same, bit for bit.

    Why: a scale that starts anew after a resume skips steps that the uninterrupted run made.
    Fix: put all that changes into state_dict().
    """
    one = PrecisionRun(context)
    one.step()
    one.overflow_gradients()
    if one.precision.optimizer_step(one.optimizer):  # it skips no step: its weights are NaN now, which hides all
        one = PrecisionRun(context)
        one.step()
    one.step()
    held = one.precision.state_dict()
    kept, given = copy.deepcopy(held), copy.deepcopy(held)
    other = PrecisionRun(context)
    other.model.load_state_dict(one.model.state_dict())
    other.precision.load_state_dict(given)
    same("the state that was loaded, afterwards", given, kept)
    same("the state after it was loaded", other.precision.state_dict(), kept)
    if own := copy.deepcopy(one.precision.rank_state_dict()):
        other.precision.load_rank_state_dict(own)
    for trained in (one, other):
        for _ in range(2):
            trained.step()
    same("the state that state_dict() had returned, two steps later", held, kept)
    same("the state that was loaded, two steps later", given, kept)
    same("the weights after two more steps", other.weights(), one.weights())
    same("the state after two more steps", other.precision.state_dict(), one.precision.state_dict())


@check("PRE-17", needs=["device"])
def plain_state(context: CheckContext) -> None:
    """state_dict() is plain data that a weights_only load reads.

    Why: a pickled object in it makes every checkpoint unreadable to the safe loader.
    Fix: numbers, strings, tensors, dicts and lists.
    """
    trained = PrecisionRun(context)
    trained.step()
    plain("state_dict()", trained.precision.state_dict())


@check("PRE-18", needs=["device"])
def closures(context: CheckContext) -> None:
    """An optimizer that evaluates a closure works, or check_optimizer refuses it with a TypeError that names it.

    One that takes a closure without needing it evaluates it once in a step.

    Why: LBFGS evaluates as often as it likes; with gradients scaled in between it goes anywhere.
    Fix: refuse it in check_optimizer.
    """
    plain, once = PrecisionRun(context), PrecisionRun(context)
    calls: list[float] = []

    def one_step() -> torch.Tensor:
        once.optimizer.zero_grad()
        loss = once.loss()
        once.precision.backward(loss)
        once.precision.unscale_gradients(once.optimizer)
        calls.append(loss.item())
        return loss

    plain.step()
    once.precision.optimizer_step(once.optimizer, one_step)
    same("how often optimizer_step evaluated the closure of SGD", len(calls), 1)
    plain.near("the weights after a step with a closure", flatten(once.weights()), flatten(plain.weights()))
    trained = PrecisionRun(context, torch.optim.LBFGS, lr=0.1)
    try:
        trained.precision.check_optimizer(trained.optimizer)
    except TypeError as error:
        require("LBFGS" in str(error), f"the message must name LBFGS (got {error})")
        return

    def closure() -> torch.Tensor:
        trained.optimizer.zero_grad()
        loss = trained.loss()
        trained.precision.backward(loss)
        return loss

    before = trained.loss().item()
    for _ in range(3):
        trained.precision.optimizer_step(trained.optimizer, closure)
    after = trained.loss().item()
    require(after < before, f"three steps of LBFGS took the loss from {before:.4g} to {after:.4g}")


@check("PRE-19", features=["fused"], needs=["device"])
def fused_optimizers(context: CheckContext) -> None:
    """Fused optimizers do what the others do, or check_optimizer refuses them with a TypeError.

    Why: they unscale by themselves under some versions, which makes it twice or never.
    Fix: refuse what can't be seen from outside.
    """
    for make, options in ((torch.optim.SGD, {"lr": 1.0}), (torch.optim.Adam, {"lr": 0.1, "eps": 1e-4})):
        one, other = PrecisionRun(context, make, **options, fused=True), PrecisionRun(context, make, **options)
        try:
            one.precision.check_optimizer(one.optimizer)
        except TypeError:
            continue
        for trained in (one, other):
            for _ in range(2):
                trained.step(clip=(1.0, "norm"))
        one.near(f"the weights under a fused {make.__name__}", flatten(one.weights()), flatten(other.weights()))


@check("PRE-21", needs=["device"], after=("PRE-09", "PRE-13"))
def two_optimizers(context: CheckContext) -> None:
    """Two optimizers are unscaled, clipped, stepped and skipped each by itself.

    Why: one optimizer's overflow held back the other, or let it step with infinities.
    Fix: keep what was found per optimizer.
    """
    trained = PrecisionRun(context)
    weight, bias = trained.model.weight, trained.model.bias
    first, second = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([bias], lr=1.0)
    reference = trained.reference()
    trained.precision.backward(trained.loss())
    trained.precision.unscale_gradients(first)
    trained.precision.clip_gradients(first, 1e-3)
    trained.precision.unscale_gradients(second)
    trained.near("the other optimizer's gradient", bias.grad, reference[1])
    require(trained.precision.optimizer_step(first) is True, "the first optimizer was not stepped")
    close("the other optimizer's weights", bias, torch.zeros(3), 0.0)
    require(trained.precision.optimizer_step(second) is True, "the second optimizer was not stepped")
    trained.near("the second optimizer's update", -bias, reference[1])
    trained.require_scaling()
    trained.model.zero_grad()
    before = weight.detach().clone()
    trained.precision.backward(trained.loss())
    with torch.no_grad():
        weight.grad.fill_(float("inf"))
    require(trained.precision.optimizer_step(first) is False, "the optimizer with the overflow was stepped")
    require(trained.precision.optimizer_step(second) is True, "the optimizer beside the overflow was skipped")
    same("weights of the optimizer with the overflow", weight.detach(), before)


@check("PRE-25", needs=["device"], after=("PRE-09",))
def loss_curve(context: CheckContext) -> None:
    """Twenty steps go down as they do in float32, up to what the arithmetic's width allows.

    Why: everything above may hold and a model still not train.
    Fix: compare gradients layer by layer with float32.
    """
    generator = context.generator(1)
    data, target = (torch.randn(32, n, generator=generator) for n in (4, 3))
    curves = []
    for precise in (True, False):
        torch.default_generator.manual_seed(context.component.seed)
        model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        trained = PrecisionRun(context)
        precision = Precision() if precise else trained.precision
        model = precision.convert_module(model)
        move_module(model, trained.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            x, y = precision.convert_input([data.to(trained.device), target.to(trained.device)])
            with precision.forward_context():
                output = model(x)
                wide = output if output.dtype in (torch.float32, torch.float64) else output.float()
                loss = F.mse_loss(wide, y.to(wide.dtype))
            precision.backward(loss)
            precision.optimizer_step(optimizer)
            losses.append(loss.item())
        curves.append(losses)
    reference, got = curves
    require(reference[-1] < 0.9 * reference[0], "the reference doesn't train: the check is broken")
    tolerance = CURVE.get(trained.precision.compute_dtype, 0.1)
    close("the losses of 20 steps", got, reference, tolerance)
