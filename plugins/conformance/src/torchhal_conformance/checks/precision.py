"""PRE: the arithmetic is the one that the name says, and a step survives it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from torchhal.errors import UnknownAliasError
from torchhal.precision import Precision
from torchhal.pytree import move_module
from torchhal.resolve import Request, resolve
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._torch_globals import torch_state

DOCUMENTED = {
    "32-true": (torch.float32, torch.float32), "64-true": (torch.float64, torch.float64),
    "16-true": (torch.float16, torch.float16), "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16), "bf16-mixed": (torch.float32, torch.bfloat16),
}  # fmt: skip
"""Alias -> (dtype of the weights, dtype of the arithmetic)."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
CURVE = {torch.float64: 1e-4, torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.1}


class Trained:
    """A precision that is set up, with a model and an optimizer under it."""

    def __init__(self, bench: CheckContext, make: Callable[..., Optimizer] = torch.optim.SGD, **options: Any) -> None:
        self.accelerator, self.device = bench.ready()
        self.precision: Precision = bench.make()
        self.precision.setup(self.accelerator, self.device)
        # zero at the start: after one step of SGD at lr=1 the weights are the gradient that was applied
        self.model: Any = nn.Linear(4, 3)
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        self.model = self.precision.convert_module(self.model)
        move_module(self.model, self.device)
        self.optimizer = make(self.model.parameters(), **{"lr": 1.0, **options})
        generator = bench.generator()
        self.batch = [torch.randn(8, n, generator=generator).to(self.device) for n in (4, 3)]
        self.tolerance = TOLERANCE.get(self.precision.compute_dtype, 3e-2)

    def loss(self, batch: Any = None, model: nn.Module | None = None) -> torch.Tensor:
        x, y = self.precision.convert_input(self.batch if batch is None else batch)
        with self.precision.forward_context():
            output = (model or self.model)(x)
            wide = output if output.dtype in (torch.float32, torch.float64) else output.float()
            loss = F.mse_loss(wide, y.to(wide.dtype)) / 4  # small enough for float16 at the usual first scale
        converted: torch.Tensor = self.precision.convert_output(loss)
        return converted

    def reference(self, batch: Any = None) -> list[torch.Tensor]:
        """The gradients that plain autograd finds in the same forward."""
        model = copy.deepcopy(self.model)
        loss = self.loss(batch, model)
        return [g.detach().cpu().double() for g in torch.autograd.grad(loss, list(model.parameters()))]

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.detach().cpu().double() for p in self.model.parameters() if p.grad is not None]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().cpu().double().clone() for p in self.model.parameters()]

    def step(self, batch: Any = None, clip: tuple[float, str] | None = None) -> bool:
        """One whole step; whether it was made."""
        self.optimizer.zero_grad()
        self.precision.backward(self.loss(batch))
        self.precision.unscale_gradients(self.optimizer)
        if clip is not None:
            self.precision.clip_gradients(self.optimizer, *clip)
        return self.precision.optimizer_step(self.optimizer)

    def scale(self) -> float:
        """What backward multiplies gradients by; clears them."""
        reference = _flat(self.reference())
        self.optimizer.zero_grad()
        self.precision.backward(self.loss())
        found = float(_flat(self.gradients()) @ reference / (reference @ reference))
        self.optimizer.zero_grad()
        return found

    def near(self, what: str, got: Any, expected: Any, factor: float = 1.0) -> None:
        """Fail unless the difference is small beside the greatest expected value."""
        got, expected = (torch.as_tensor(value).detach().cpu().double() for value in (got, expected))
        unit = float(expected.abs().max()) or 1.0
        close(f"{what} (in units of {unit:.4g})", got / unit, expected / unit, factor * self.tolerance)

    def scales(self) -> None:
        """Skip the check unless the loss is scaled."""
        if abs(self.scale() - 1) < 1e-2:
            raise NotApplicable("this precision doesn't scale the loss")

    def poison(self) -> None:
        """Gradients that aren't finite, through the precision's own backward."""
        self.precision.backward(self.loss() * float("inf"))


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(_flat(tensors).norm())


class _Mixed(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor([1 + 2j]))


@check("PRE-01", needs=["device"])
def documented_dtypes(bench: CheckContext) -> None:
    """The weights and the arithmetic have the dtypes that ``param_dtype`` and ``compute_dtype`` say, which for a common
    alias are the common ones; an unknown alias or dtype is an error that lists the valid ones.

    Why: a precision that silently falls back to float32 costs twice the memory and nobody asks why.
    Fix: set both attributes in the constructor, and convert what they say.
    """
    trained = Trained(bench)
    precision = trained.precision
    documented = DOCUMENTED.get(bench.subject.entry.component.alias, (precision.param_dtype, precision.compute_dtype))
    same("param_dtype and compute_dtype", (precision.param_dtype, precision.compute_dtype), documented)
    same("dtype of the weights", trained.model.weight.dtype, documented[0])
    with precision.forward_context():
        output = trained.model(precision.convert_input(trained.batch[0]))
    same("dtype of a product in forward_context", output.dtype, documented[1])
    raises("an unknown alias", UnknownAliasError, lambda: resolve(Request(precision="77-true")), "77-true", "32-true")
    if "dtype" in bench.subject.entry.component.defaults or "dtype" in bench.subject.arguments:
        raises("an unknown dtype", ValueError, lambda: bench.make(dtype="float77"), "float77")


@check("PRE-02", needs=["device"])
def buffers(bench: CheckContext) -> None:
    """convert_module leaves integer, boolean and complex buffers as they are.

    Why: a position index in bfloat16 counts to 256.
    Fix: convert what is_floating_point() and nothing else.
    """
    precision = Trained(bench).precision
    model: Any = precision.convert_module(_Mixed())
    same("the buffers", dict(model.named_buffers()), dict(_Mixed().named_buffers()))
    same("dtype of the weights", model.layer.weight.dtype, precision.param_dtype)


@check("PRE-03", needs=["device"])
def tied(bench: CheckContext) -> None:
    """convert_module keeps tied parameters tied, and parameters the objects that they were.

    Why: an optimizer made before holds the old objects and moves nothing.
    Fix: change parameter.data, or go through Module._apply.
    """
    precision = Trained(bench).precision
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight
    model = precision.convert_module(model)
    require(model[0].weight is model[1].weight, "tied weights have come apart")
    require(model[0].weight is before, "the parameter is another object than the optimizer holds")


@check("PRE-04", needs=["device"])
def init_context(bench: CheckContext) -> None:
    """Inside of module_init_context() new parameters are of ``param_dtype``; afterwards the default dtype is as before.

    Why: a default dtype that stays changed makes every later tensor of the process another one.
    Fix: remember torch.get_default_dtype() on the way in, restore it on the way out.
    """
    precision = Trained(bench).precision
    before = torch.get_default_dtype()
    with precision.module_init_context():
        same("dtype of a parameter made inside", nn.Linear(2, 2).weight.dtype, precision.param_dtype)
    same("the default dtype afterwards", torch.get_default_dtype(), before)


class _Stop(Exception):
    pass


@check("PRE-05", needs=["device"])
def contexts_and_errors(bench: CheckContext) -> None:
    """module_init_context() and forward_context() restore what they changed when their body raises.

    Why: a notebook goes on after an error, in another dtype.
    Fix: restore in __exit__ or finally, whatever happened.
    """
    trained = Trained(bench)
    before = _surroundings(trained)
    for name in ("module_init_context", "forward_context"):
        try:
            with getattr(trained.precision, name)():
                raise _Stop
        except _Stop:
            pass
        else:
            raise CheckFailed(f"{name}() swallows errors")
        same(f"dtype and autocast after an error in {name}()", _surroundings(trained), before)


def _surroundings(trained: Trained) -> tuple[torch.dtype, bool]:
    return torch.get_default_dtype(), torch.is_autocast_enabled(trained.device.type)


@check("PRE-06", needs=["device"])
def nested_contexts(bench: CheckContext) -> None:
    """forward_context() can be entered again and inside of itself, one object too; autocast is off after the last exit.

    Why: a validation step inside of a training step turned autocast off for the rest of it, or left it on for ever.
    Fix: keep a stack of what to restore.
    """
    trained = Trained(bench)
    precision, before = trained.precision, _surroundings(trained)
    context = precision.forward_context()
    with context:
        inside = _surroundings(trained)
        for again in (context, precision.forward_context()):
            with again:
                same("dtype and autocast in the inner context", _surroundings(trained), inside)
            same("dtype and autocast after the inner context", _surroundings(trained), inside)
    same("dtype and autocast afterwards", _surroundings(trained), before)
    with context:
        same("dtype and autocast when it is entered again", _surroundings(trained), inside)
    same("dtype and autocast after that", _surroundings(trained), before)


@check("PRE-07", needs=["device"])
def inputs(bench: CheckContext) -> None:
    """convert_input converts floating-point tensors at any depth and nothing else; what is right already is not copied.

    Why: labels turned into bfloat16 are other classes, and a copy of each batch costs a step its memory.
    Fix: torchhal.pytree.map_tensors over is_floating_point().
    """
    precision = Trained(bench).precision
    x = torch.rand(2, 3)
    others: dict[str, Any] = {
        "label": torch.tensor([300, 1]),
        "mask": torch.tensor([True]),
        "z": torch.tensor([1j]),
        "text": "a",
    }
    converted = precision.convert_input({"x": [x, (x, None)], **others})
    expected = converted["x"][0].dtype
    same("dtype of a deeper tensor", converted["x"][1][0].dtype, expected)
    narrow = {precision.param_dtype, torch.float32}
    require(expected in narrow, f"a float32 input became {expected}, the weights are {precision.param_dtype}")
    for name, value in others.items():
        require(converted[name] is value, f"{name!r} was converted or copied: {converted[name]!r}")
    ready = x.to(expected)
    require(precision.convert_input({"x": ready})["x"] is ready, "an input of the right dtype was copied")
    if precision.param_dtype is precision.compute_dtype and precision.param_dtype is not torch.float32:
        same("dtype of a float32 input", expected, precision.param_dtype)


@check("PRE-08", needs=["device"])
def outputs(bench: CheckContext) -> None:
    """convert_output gives floating-point tensors the default dtype, at any depth, and leaves the rest alone.

    Why: a bfloat16 loss shows three digits in every log.
    Fix: cast to torch.get_default_dtype().
    """
    precision = Trained(bench).precision
    half, whole = torch.rand(3).to(precision.compute_dtype), torch.arange(3)
    converted = precision.convert_output({"loss": half, "nest": [(half,)], "count": whole})
    if precision.compute_dtype is not torch.float64 or precision.param_dtype is torch.float64:
        same("dtype of an output", converted["loss"].dtype, torch.get_default_dtype())
        same("dtype of a deeper output", converted["nest"][0][0].dtype, torch.get_default_dtype())
    require(converted["count"] is whole, "an integer output was converted")


@check("PRE-09", needs=["device"])
def gradients(bench: CheckContext) -> None:
    """After backward() every gradient is one scale times the true one, and after unscale_gradients() the true one.

    Why: a scale that is applied twice, or never taken away, is a learning rate that is 65536 times too large.
    Fix: scale the loss in backward() and nowhere else.
    """
    trained = Trained(bench)
    reference = _flat(trained.reference())
    trained.precision.backward(trained.loss())
    got = _flat(trained.gradients())
    scale = float(got @ reference / (reference @ reference))
    require(scale > 0.5, f"after backward() gradients are {scale:.3g} times the true ones")
    trained.near(f"gradients after backward(), divided by the scale {scale:.6g}", got / scale, reference)
    trained.precision.unscale_gradients(trained.optimizer)
    trained.near("gradients after unscale_gradients()", _flat(trained.gradients()), reference)


@check("PRE-10", needs=["device"])
def clip_by_norm(bench: CheckContext) -> None:
    """Clipped by norm, the update has the smaller one of the limit and the gradient's norm; the norm before clipping is
    returned.

    Why: clipping before unscaling shrinks every gradient to nothing, and the loss still goes down a little.
    Fix: unscale first.
    """
    norm = _norm(Trained(bench).reference())
    for limit, expected in ((norm / 10, norm / 10), (norm * 10, norm)):
        trained = Trained(bench)
        trained.precision.backward(trained.loss())
        returned = trained.precision.clip_gradients(trained.optimizer, limit, "norm")
        trained.precision.optimizer_step(trained.optimizer)
        what = f"norm of the update, of a gradient of norm {norm:.4g} clipped to {limit:.4g},"
        close(
            f"{what} relative to the expected", _norm(trained.weights()) / expected, 1.0, max(trained.tolerance, 1e-4)
        )
        require(returned is not None, "clip_gradients by norm returned no norm")
        close("the norm that clip_gradients returned, relative", float(returned) / norm, 1.0, trained.tolerance)  # type: ignore[arg-type]


@check("PRE-11", needs=["device"])
def clip_by_value(bench: CheckContext) -> None:
    """Clipped by value, each entry of the update is the gradient's, cut at the limit; an unknown algorithm is a
    ValueError that names it.

    Why: an algorithm argument that is ignored clips otherwise than the paper says.
    Fix: branch on it, and refuse the rest.
    """
    trained = Trained(bench)
    reference = _flat(trained.reference())
    limit = float(reference.abs().median())
    trained.step(clip=(limit, "value"))
    trained.near("the update", -_flat(trained.weights()), reference.clamp(-limit, limit))
    unknown = Trained(bench)
    unknown.precision.backward(unknown.loss())
    raises(
        "clipping by 'luck'",
        ValueError,
        lambda: unknown.precision.clip_gradients(unknown.optimizer, 1.0, "luck"),
        "luck",
    )


@check("PRE-12", needs=["device"])
def unscale_once(bench: CheckContext) -> None:
    """However often gradients are unscaled and clipped in a step, they are unscaled once.

    Why: logging the norm and clipping both unscale; the second time the gradient is gone.
    Fix: remember for which optimizer it was done since its last step.
    """
    trained = Trained(bench)
    reference = trained.reference()
    for _ in range(2):  # the second step too: what was remembered must be forgotten
        trained.optimizer.zero_grad()
        start = trained.weights()
        reference = trained.reference()
        trained.precision.backward(trained.loss())
        for _ in range(3):
            trained.precision.unscale_gradients(trained.optimizer)
        trained.precision.clip_gradients(trained.optimizer, 1e6)
        trained.near("gradients unscaled three times", _flat(trained.gradients()), _flat(reference))
        trained.precision.optimizer_step(trained.optimizer)
        update = _flat(start) - _flat(trained.weights())
        trained.near("the update", update, _flat(reference), 2)


@check("PRE-13", needs=["device"])
def overflow(bench: CheckContext) -> None:
    """With an infinite or NaN gradient the weights stay, the scale falls, and the next good step is made.

    Why: one step with an infinity ends a run; a scale that never falls ends it too.
    Fix: look at the unscaled gradients before the optimizer does, and update the scale.
    """
    trained = Trained(bench)
    trained.scales()
    scale, before = trained.scale(), trained.weights()
    trained.poison()
    trained.precision.unscale_gradients(trained.optimizer)
    trained.precision.optimizer_step(trained.optimizer)
    same("the weights after a step with infinite gradients", trained.weights(), before)
    trained.optimizer.zero_grad()
    require(trained.scale() < scale, f"the scale is {trained.scale():.6g}, it was {scale:.6g} before the overflow")
    trained.step()
    require(_norm(trained.weights()) > 0, "the good step after an overflow was not made")
    require(bool(torch.isfinite(_flat(trained.weights())).all()), "the weights are not finite")


@check("PRE-14", needs=["device"])
def skipped_step(bench: CheckContext) -> None:
    """optimizer_step answers True when the weights were updated, and False when the step was skipped.

    Why: a scheduler that advances on skipped steps decays the rate for nothing.
    Fix: return what happened.
    """
    trained = Trained(bench)
    require(trained.step() is True, "optimizer_step of a good step must answer True")
    trained.scales()
    trained.optimizer.zero_grad()
    trained.poison()
    answer = trained.precision.optimizer_step(trained.optimizer)
    require(answer is False, f"optimizer_step of a skipped step must answer False (got {answer!r})")


@check("PRE-15", needs=["device"])
def accumulation(bench: CheckContext) -> None:
    """Four micro-batches make the step of one batch, and the state changes once per optimizer step.

    Why: a scale that follows each backward is another one at the end of an accumulation than at its start.
    Fix: update in optimizer_step.
    """
    whole, parts = Trained(bench), Trained(bench)
    for _ in range(2):
        whole.step()
        parts.optimizer.zero_grad()
        for rows in range(0, 8, 2):
            parts.precision.backward(parts.loss([tensor[rows : rows + 2] for tensor in parts.batch]) / 4)
        parts.precision.unscale_gradients(parts.optimizer)
        parts.precision.optimizer_step(parts.optimizer)
        same("the state after a step of four micro-batches", parts.precision.state_dict(), whole.precision.state_dict())
        whole.near("the weights", _flat(parts.weights()), _flat(whole.weights()), 3)


@check("PRE-16", needs=["device"])
def state(bench: CheckContext) -> None:
    """A precision that continues from another one's state does the same, bit for bit.

    Why: a scale that starts anew after a resume skips steps that the uninterrupted run made.
    Fix: put all that changes into state_dict().
    """
    one = Trained(bench)
    one.step()
    one.poison()
    one.precision.optimizer_step(one.optimizer)
    one.step()
    kept = copy.deepcopy(one.precision.state_dict())
    other = Trained(bench)
    other.model.load_state_dict(one.model.state_dict())
    other.precision.load_state_dict(copy.deepcopy(kept))
    same("the state after it was loaded", other.precision.state_dict(), kept)
    for trained in (one, other):
        for _ in range(2):
            trained.step()
    same("the weights after two more steps", other.weights(), one.weights())
    same("the state after two more steps", other.precision.state_dict(), one.precision.state_dict())


@check("PRE-17", needs=["device"])
def plain_state(bench: CheckContext) -> None:
    """state_dict() is plain data that a weights_only load reads.

    Why: a pickled object in it makes every checkpoint unreadable to the safe loader.
    Fix: numbers, strings, tensors, dicts and lists.
    """
    trained = Trained(bench)
    trained.step()
    found = trained.precision.state_dict()
    buffer = io.BytesIO()
    try:
        torch.save(found, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckFailed(f"state_dict() is no plain data ({type(error).__name__}: {error})") from error
    same("the state that was loaded", loaded, found)


@check("PRE-18", needs=["device"])
def closures(bench: CheckContext) -> None:
    """An optimizer that evaluates a closure works, or check_optimizer refuses it with a TypeError that names it.

    Why: LBFGS evaluates as often as it likes; with gradients scaled in between it goes anywhere.
    Fix: refuse it in check_optimizer.
    """
    trained = Trained(bench, torch.optim.LBFGS, lr=0.1)
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
def fused_optimizers(bench: CheckContext) -> None:
    """Fused optimizers do what the others do, or check_optimizer refuses them with a TypeError.

    Why: they unscale by themselves under some versions, which makes it twice or never.
    Fix: refuse what can't be seen from outside.
    """
    for make, options in ((torch.optim.SGD, {"lr": 1.0}), (torch.optim.Adam, {"lr": 0.1, "eps": 1e-4})):
        one, other = Trained(bench, make, **options, fused=True), Trained(bench, make, **options)
        try:
            one.precision.check_optimizer(one.optimizer)
        except TypeError:
            continue
        for trained in (one, other):
            for _ in range(2):
                trained.step(clip=(1.0, "norm"))
        one.near(f"the weights under a fused {make.__name__}", _flat(one.weights()), _flat(other.weights()))


@check("PRE-20", needs=["device"])
def master_weights(bench: CheckContext) -> None:
    """Weights and the optimizer's state stay in ``param_dtype``: float32 where the arithmetic is narrower.

    Why: an update below half a digit of a bfloat16 weight is lost, so the end of training does nothing.
    Fix: convert trainable half-width parameters to float32.
    """
    trained = Trained(bench, torch.optim.Adam, lr=0.1)
    precision = trained.precision
    mixed = precision.param_dtype is not precision.compute_dtype
    if mixed:
        same("param_dtype of a mixed precision", precision.param_dtype, torch.float32)
        half = precision.convert_module(nn.Linear(2, 2).to(precision.compute_dtype))
        same("dtype of trainable weights that came in half width", half.weight.dtype, torch.float32)
    trained.step()
    for name, parameter in trained.model.named_parameters():
        same(f"dtype of {name} after a step", parameter.dtype, precision.param_dtype)
        moment = trained.optimizer.state[parameter]["exp_avg"]
        same(f"dtype of the optimizer's state for {name}", moment.dtype, precision.param_dtype)


@check("PRE-21", needs=["device"])
def two_optimizers(bench: CheckContext) -> None:
    """Two optimizers are unscaled, clipped, stepped and skipped each by itself.

    Why: one optimizer's overflow held back the other, or let it step with infinities.
    Fix: keep what was found per optimizer.
    """
    trained = Trained(bench)
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
    trained.scales()
    trained.model.zero_grad()
    before = weight.detach().clone()
    trained.precision.backward(trained.loss())
    with torch.no_grad():
        weight.grad.fill_(float("inf"))
    require(trained.precision.optimizer_step(first) is False, "the optimizer with the overflow was stepped")
    require(trained.precision.optimizer_step(second) is True, "the optimizer beside the overflow was skipped")
    same("weights of the optimizer with the overflow", weight.detach(), before)


@check("PRE-22", needs=["device"])
def main_params(bench: CheckContext) -> None:
    """main_params yields each parameter of an optimizer exactly once, over all of its groups.

    Why: what is yielded twice is clipped twice, and what is left out never.
    Fix: go through param_groups and remember ids.
    """
    trained = Trained(bench)
    weight, bias = trained.model.weight, trained.model.bias
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    found = [id(parameter) for parameter in trained.precision.main_params(optimizer)]
    same("the parameters, by their names", sorted(found.count(id(one)) for one in (weight, bias)), [1, 1])
    same("how many parameters were yielded", len(found), 2)


@check("PRE-23", needs=["device"])
def evaluation(bench: CheckContext) -> None:
    """Evaluation computes in the dtype of training.

    Why: a model that is evaluated in another precision is another model.
    Fix: return the same context whatever grad mode is.
    """
    trained = Trained(bench)
    dtypes = []
    for training in (True, False):
        trained.model.train(training)
        with torch.set_grad_enabled(training), trained.precision.forward_context():
            dtypes.append(trained.model(trained.precision.convert_input(trained.batch[0])).dtype)
    same("dtype of an output in evaluation", dtypes[1], dtypes[0])


@check("PRE-24", needs=["device"])
def teardown(bench: CheckContext) -> None:
    """After teardown() the process is as it was before setup(): default dtype, matmul precision, autocast, patches.

    Why: the next run in the process, with another precision, gets a mixture.
    Fix: restore in teardown() what setup() changed; it may be called twice.
    """
    before = torch_state()
    watched = [torch.Tensor, nn.Module, nn.functional, Optimizer, torch.optim.SGD, nn.utils]
    names = [(owner, dict(vars(owner))) for owner in watched]
    trained = Trained(bench)
    trained.step()
    trained.precision.teardown()
    trained.precision.teardown()
    after = torch_state()
    changed = [f"{name}: {before[name]!r} became {after[name]!r}" for name in before if before[name] != after[name]]
    changed += [
        f"{getattr(owner, '__name__', owner)}.{name} is another object"
        for owner, values in names
        for name, value in values.items()
        if vars(owner).get(name) is not value and not name.startswith("__")
    ]
    require(not changed, "; ".join(changed))


@check("PRE-25", needs=["device"])
def loss_curve(bench: CheckContext) -> None:
    """Twenty steps go down as they do in float32, up to what the arithmetic's width allows.

    Why: everything above may hold and a model still not train.
    Fix: compare gradients layer by layer with float32.
    """
    generator = bench.generator(1)
    data, target = (torch.randn(32, n, generator=generator) for n in (4, 3))
    curves = []
    for precise in (True, False):
        torch.default_generator.manual_seed(bench.subject.seed)
        model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        trained = Trained(bench)
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


@check("PRE-26", needs=["device"])
def right_branch(bench: CheckContext) -> None:
    """float32 and float64 compute without autocast, bit for bit what plain torch does; bfloat16 scales no loss.

    Plain torch is that before the set-up, for a precision whose class has the alias "32-true" or "64-true": neither
    may turn to TensorFloat-32 or bfloat16 in products. One of another name, such as "tf32", may say so in its setup().

    Why: the branch for one precision was taken for another one.
    Fix: decide by compute_dtype, once; leave torch.set_float32_matmul_precision to the user.
    """
    device = bench.ready()[1]
    dtype = bench.make().compute_dtype
    exact = dtype in (torch.float32, torch.float64) and bench.subject.part.alias in ("32-true", "64-true")

    def product() -> torch.Tensor:
        one, other = (torch.randn(64, 64, dtype=dtype, generator=bench.generator(i)) for i in range(2))
        return one.to(device) @ other.to(device)

    if exact:
        before, switch = product(), torch.get_float32_matmul_precision()
    trained = Trained(bench)
    if dtype in (torch.float32, torch.float64):
        with trained.precision.forward_context():
            require(not torch.is_autocast_enabled(device.type), f"autocast is on under {dtype}")
            got = product()
        if exact:
            same("torch.get_float32_matmul_precision() after setup()", torch.get_float32_matmul_precision(), switch)
        same("a product", got, before if exact else product())
    if dtype is not torch.float16:
        close(f"what gradients are multiplied by in {dtype}", trained.scale(), 1.0, 1e-3)
