"""PRE: dtypes of weights, inputs and outputs, and the contexts that select them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import UnknownAliasError
from torchhal.precision import Precision
from torchhal.resolve import Request, resolve
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._error_text import first_line, with_article
from torchhal_conformance._generated_inputs import for_each, nests, tensors
from torchhal_conformance._tensor_specs import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    NestSpec,
    TensorSpec,
    deepest,
    layouts_of,
    parts,
)
from torchhal_conformance._torch_globals import torch_state
from torchhal_conformance.checks._precision_run import PrecisionRun, flatten

DOCUMENTED = {
    "32-true": (torch.float32, torch.float32), "64-true": (torch.float64, torch.float64),
    "16-true": (torch.float16, torch.float16), "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16), "bf16-mixed": (torch.float32, torch.bfloat16),
}  # fmt: skip
"""Alias -> (dtype of the weights, dtype of the arithmetic)."""


class _Mixed(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor([1 + 2j]))


@check("PRE-01", needs=["device"])
def documented_dtypes(context: CheckContext) -> None:
    """The weights and the arithmetic have the dtypes that ``param_dtype`` and ``compute_dtype`` say.

    For a common alias these are the common ones; an unknown alias or dtype is an error that lists the valid ones.

    Why: a precision that silently falls back to float32 costs twice the memory and nobody asks why.
    Fix: set both attributes in the constructor, and convert what they say.
    """
    trained = PrecisionRun(context)
    precision = trained.precision
    documented = DOCUMENTED.get(
        context.component.entry.component.alias, (precision.param_dtype, precision.compute_dtype)
    )
    same("param_dtype and compute_dtype", (precision.param_dtype, precision.compute_dtype), documented)
    same("dtype of the weights", trained.model.weight.dtype, documented[0])
    with precision.forward_context():
        output = trained.model(precision.convert_input(trained.batch[0]))
    same("dtype of a product in forward_context", output.dtype, documented[1])
    raises("an unknown alias", UnknownAliasError, lambda: resolve(Request(precision="77-true")), "77-true", "32-true")
    if "dtype" in context.component.entry.component.defaults or "dtype" in context.component.arguments:
        raises("an unknown dtype", ValueError, lambda: context.create(dtype="float77"), "float77")


@check("PRE-02", needs=["device"])
def buffers(context: CheckContext) -> None:
    """convert_module leaves integer, boolean and complex buffers as they are, and converts all parameters.

    Frozen parameters, and those of modules in modules, are converted too. They stay frozen, and trainable ones stay
    trainable.

    Why: a position index in bfloat16 counts to 256.
    Fix: convert what is_floating_point() and nothing else.
    """
    precision = PrecisionRun(context).precision
    model: Any = precision.convert_module(_Mixed())
    same("the buffers", dict(model.named_buffers()), dict(_Mixed().named_buffers()))
    same("dtype of the weights", model.layer.weight.dtype, precision.param_dtype)
    deep: Any = nn.ModuleDict({"a": nn.Sequential(_Mixed(), nn.ModuleList([nn.LSTM(2, 2)]))})
    frozen = {name for name, _ in deep.named_parameters() if "bias" in name}
    for name, parameter in deep.named_parameters():
        parameter.requires_grad_(name not in frozen)
    deep = precision.convert_module(deep)
    for name, parameter in deep.named_parameters():
        mixed = precision.param_dtype is not precision.compute_dtype
        if name not in frozen or not mixed:
            same(f"dtype of {name}{' (frozen)' if name in frozen else ''}", parameter.dtype, precision.param_dtype)
        same(f"requires_grad of {name}", parameter.requires_grad, name not in frozen)


@check("PRE-03", needs=["device"])
def tied(context: CheckContext) -> None:
    """convert_module keeps tied parameters tied, and parameters the objects that they were.

    Why: an optimizer made before holds the old objects and moves nothing.
    Fix: change parameter.data, or go through Module._apply.
    """
    precision = PrecisionRun(context).precision
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight
    model = precision.convert_module(model)
    require(model[0].weight is model[1].weight, "tied weights have come apart")
    require(model[0].weight is before, "the parameter is another object than the optimizer holds")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with precision.forward_context():
        output = model(precision.convert_input(torch.ones(2, 4)).to(next(model.parameters()).device))
    output.float().sum().backward()
    start = model[1].weight.detach().clone()
    optimizer.step()
    require(not torch.equal(model[1].weight, start), "an optimizer made after the conversion doesn't move tied weights")
    require(model[0].weight is model[1].weight, "tied weights have come apart in a step")


@check("PRE-04", needs=["device"])
def init_context(context: CheckContext) -> None:
    """Inside of module_init_context() new parameters are of ``param_dtype``; afterwards the default dtype is as before.

    Why: a default dtype that stays changed makes every later tensor of the process another one.
    Fix: remember torch.get_default_dtype() on the way in, restore it on the way out.
    """
    precision = PrecisionRun(context).precision
    before = torch.get_default_dtype()
    with precision.module_init_context():
        same("dtype of a parameter made inside", nn.Linear(2, 2).weight.dtype, precision.param_dtype)
    same("the default dtype afterwards", torch.get_default_dtype(), before)


class _Stop(Exception):
    pass


@check("PRE-05", needs=["device"])
def contexts_and_errors(context: CheckContext) -> None:
    """module_init_context() and forward_context() restore what they changed when their body raises.

    That holds whatever the default dtype and grad mode were.

    Why: a notebook goes on after an error, in another dtype.
    Fix: restore in __exit__ or finally, whatever happened.
    """
    trained = PrecisionRun(context)
    start = torch.get_default_dtype()
    for dtype, gradients in ((start, True), (torch.float64, True), (torch.bfloat16, False), (start, False)):
        torch.set_default_dtype(dtype)
        with torch.set_grad_enabled(gradients):
            before = _surroundings(trained)
            for name in ("module_init_context", "forward_context"):
                for body in ("an error", "no error"):
                    try:
                        with getattr(trained.precision, name)():
                            if body == "an error":
                                raise _Stop
                    except _Stop:
                        continue
                    else:
                        require(body == "no error", f"{name}() swallows errors")
                    finally:
                        told = f"after {body} in {name}() under {dtype}{'' if gradients else ' and no_grad'}"
                        same(f"torch's state {told}", _surroundings(trained), before)
        torch.set_default_dtype(start)


def _surroundings(trained: PrecisionRun) -> dict[str, Any]:
    """Return torch's switches and random state, by names for messages."""
    return {
        **torch_state(),
        "autocast": torch.is_autocast_enabled(trained.device.type),
        "the CPU's random state": torch.get_rng_state(),
    }


@check("PRE-06", needs=["device"])
def nested_contexts(context: CheckContext) -> None:
    """forward_context() can be entered again and inside of itself, one object too; autocast is off after the last exit.

    Entering and leaving it draws no random number. After an error in the inner one the outer one goes on.

    Why: a validation step inside of a training step turned autocast off for the rest of it, or left it on for ever.
    Fix: keep a stack of what to restore, in a class with __enter__ and __exit__: contextlib.contextmanager makes
    objects that can be entered once.
    """
    trained = PrecisionRun(context)
    precision, before = trained.precision, _surroundings(trained)
    forward = precision.forward_context()
    with forward:
        _require_reentrant(forward)
        inside = _surroundings(trained)
        same("the random state in the context", inside["the CPU's random state"], before["the CPU's random state"])
        for again in (forward, precision.forward_context()):
            with again:
                same("dtype and autocast in the inner context", _surroundings(trained), inside)
            same("dtype and autocast after the inner context", _surroundings(trained), inside)
            with contextlib.suppress(_Stop), again:
                raise _Stop
            same("dtype and autocast after an error in the inner context", _surroundings(trained), inside)
    same("dtype and autocast afterwards", _surroundings(trained), before)
    with forward:
        same("dtype and autocast when it is entered again", _surroundings(trained), inside)
    same("dtype and autocast after that", _surroundings(trained), before)


def _require_reentrant(entered: AbstractContextManager[Any]) -> None:
    """Fail the check for an object that can't be entered again inside of itself."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(entered)
        except Exception as error:
            raise CheckFailed(
                "forward_context() must return one object that can be entered several times, inside of itself too "
                f"(entering {with_article(type(entered).__name__)} again raised {first_line(error)})"
            ) from error


@check("PRE-07", needs=["device"])
def inputs(context: CheckContext) -> None:
    """convert_input converts floating-point tensors at any depth and nothing else; what is right already is not copied.

    Why: labels turned into bfloat16 are other classes, and a copy of each batch costs a step its memory.
    Fix: torchhal.pytree.map_tensors over is_floating_point().
    """
    precision = PrecisionRun(context).precision
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

    def each(spec: NestSpec | TensorSpec) -> None:
        batch = spec.build()
        got, wanted = precision.convert_input(batch), expected_input(precision)
        _same_structure("convert_input", got, batch, wanted)
        same("the batch that was given, afterwards", batch, spec.build())

    dtypes = [*FLOATS, *COMPLEX, *INTEGERS]
    corners = [TensorSpec(dtype, (2, 3), name) for dtype in dtypes for name in layouts_of(dtype)]
    leaves = tensors(dtypes)
    for_each("an input", each, corners=[*corners, *deepest(TensorSpec())], generated=nests(leaves),
             seed=context.component.seed)  # fmt: skip


def expected_input(precision: Precision) -> dict[torch.dtype, torch.dtype]:
    """Return the dtype that inputs of each floating-point dtype become: all the same, or each its own.

    That of float32 decides, as a precision that changes nothing leaves each as it is, and one that converts converts
    all.
    """
    target = precision.convert_input(torch.ones(1)).dtype
    probe = precision.convert_input(
        torch.ones(1, dtype=torch.bfloat16 if target is not torch.bfloat16 else torch.float16)
    )
    return {dtype: target if probe.dtype is target else dtype for dtype in FLOATS}


def _same_structure(name: str, got: Any, given: Any, wanted: dict[torch.dtype, torch.dtype]) -> None:
    """Fail unless ``got`` is ``given`` but for the dtypes of its floating-point tensors, and shares what it may."""
    one, other = list(parts(got)), list(parts(given))
    same(f"places in the result of {name}", [path for path, _ in one], [path for path, _ in other])
    for (path, new), (_, old) in zip(one, other, strict=True):
        place = f"value{path}"
        if not isinstance(old, torch.Tensor):
            require(
                type(new) is type(old),
                f"{place} became {with_article(type(new).__name__)}, it was {with_article(type(old).__name__)}",
            )
            continue
        dtype = wanted.get(old.dtype, old.dtype)
        if dtype is old.dtype:
            require(new is old, f"{place}, {old.dtype}, was converted to {new.dtype} or copied")
        else:
            same(place, new.detach(), old.detach().to(dtype))


@check("PRE-08", needs=["device"])
def outputs(context: CheckContext) -> None:
    """convert_output gives narrower floating-point tensors the default dtype, at any depth, and leaves the rest alone.

    Why: a bfloat16 loss shows three digits in every log.
    Fix: cast to torch.get_default_dtype().
    """
    precision = PrecisionRun(context).precision
    half, whole = torch.rand(3).to(precision.compute_dtype), torch.arange(3)
    converted = precision.convert_output({"loss": half, "nest": [(half,)], "count": whole})
    if precision.compute_dtype is not torch.float64:
        same("dtype of an output", converted["loss"].dtype, torch.get_default_dtype())
        same("dtype of a deeper output", converted["nest"][0][0].dtype, torch.get_default_dtype())
    require(converted["count"] is whole, "an integer output was converted")
    before = torch.get_default_dtype()
    for default in (torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            # a precision that changes nothing leaves each dtype as it is
            converts = precision.convert_output(torch.ones(1, dtype=torch.float16)).dtype is not torch.float16
            converts |= precision.convert_output(torch.ones(1, dtype=torch.bfloat16)).dtype is not torch.bfloat16
            wanted = {dtype: default if converts else dtype for dtype in FLOATS}
            wanted[torch.float64] = wide = precision.convert_output(torch.ones(1, dtype=torch.float64)).dtype
            require(wide in (torch.float64, default), f"an output in float64 becomes {wide}")

            def each(spec: NestSpec | TensorSpec, wanted: dict[torch.dtype, torch.dtype] = wanted) -> None:
                output = spec.build()
                _same_structure("convert_output", precision.convert_output(output), output, wanted)

            dtypes = [precision.compute_dtype, *COMPLEX, *INTEGERS]
            corners = [TensorSpec(dtype, (2, 3), name) for dtype in dtypes for name in layouts_of(dtype)]
            for_each(f"an output under a default dtype of {default}", each,
                     corners=[*corners, *deepest(TensorSpec(precision.compute_dtype))],
                     generated=nests(tensors(dtypes)), seed=context.component.seed, seconds=2.0)  # fmt: skip
        finally:
            torch.set_default_dtype(before)


@check("PRE-20", needs=["device"])
def master_weights(context: CheckContext) -> None:
    """Weights and the optimizer's state stay in ``param_dtype``: float32 where the arithmetic is narrower.

    Why: an update below half a digit of a bfloat16 weight is lost, so the end of training does nothing.
    Fix: convert trainable half-width parameters to float32.
    """
    trained = PrecisionRun(context, torch.optim.Adam, lr=0.1)
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
        stored = precision.optimizer_state_dtype(parameter, "exp_avg") or precision.param_dtype
        same(f"dtype of the optimizer's state for {name}", moment.dtype, stored)


@check("PRE-23", needs=["device"], after=("PRE-01",))
def evaluation(context: CheckContext) -> None:
    """Evaluation computes in the dtype of training, and under no_grad and inference_mode without gradients.

    Why: a model that is evaluated in another precision is another model.
    Fix: return the same context whatever grad mode is.
    """
    trained = PrecisionRun(context)
    dtypes = []
    for training in (True, False):
        trained.model.train(training)
        with torch.set_grad_enabled(training), trained.precision.forward_context():
            dtypes.append(trained.model(trained.precision.convert_input(trained.batch[0])).dtype)
    same("dtype of an output in evaluation", dtypes[1], dtypes[0])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            with trained.precision.forward_context():
                output = trained.model(trained.precision.convert_input(trained.batch[0]))
            converted = trained.precision.convert_output(output)
        require(not converted.requires_grad, f"an output under {mode.__name__} has a graph")
        same(f"dtype of an output under {mode.__name__}", output.dtype, dtypes[0])
    reference = flatten(trained.reference())
    trained.optimizer.zero_grad()
    trained.precision.backward(trained.loss())
    require(float(flatten(trained.gradients()) @ reference) > 0, "a backward after an evaluation has no gradients")


@check("PRE-24", needs=["device"])
def complete_teardown(context: CheckContext) -> None:
    """After teardown() the process is as it was before setup(): default dtype, matmul precision, autocast, patches.

    Why: the next run in the process, with another precision, gets a mixture.
    Fix: restore in teardown() what setup() changed; it may be called twice.
    """
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # the first of a process wraps its class's step
    before = torch_state()
    watched = [torch.Tensor, nn.Module, nn.functional, Optimizer, torch.optim.SGD, nn.utils]
    names = [(owner, dict(vars(owner))) for owner in watched]
    trained = PrecisionRun(context)
    trained.step()
    for life in (1, 2, 3):
        if life > 1:  # the object is used again, once without a step and once set up twice
            for _ in range(life - 1):
                trained.precision.setup(trained.accelerator, trained.device)
            trained.precision.convert_module(nn.Linear(2, 2))
        trained.precision.teardown()
        trained.precision.teardown()
        for name, value in torch_state().items():
            same(f"{name} after teardown() of life {life}", value, before[name])
    after = torch_state()
    changed = [f"{name}: {before[name]!r} became {after[name]!r}" for name in before if before[name] != after[name]]
    changed += [
        f"{getattr(owner, '__name__', owner)}.{name} is another object"
        for owner, values in names
        for name, value in values.items()
        if vars(owner).get(name) is not value and not name.startswith("__")
    ]
    require(not changed, "; ".join(changed))


@check("PRE-26", needs=["device"])
def right_branch(context: CheckContext) -> None:
    """float32 and float64 compute without autocast, bit for bit what plain torch does; bfloat16 scales no loss.

    Plain torch is that before the set-up, for a precision whose alias is "32-true" or "64-true": neither may turn to
    TensorFloat-32 or bfloat16 in products. One of another name, such as "tf32", may say so in its setup(). The alias
    is an instance's, as one that sets it in __init__ has the base class's in its class.

    Why: the branch for one precision was taken for another one.
    Fix: decide by compute_dtype, once; leave torch.set_float32_matmul_precision to the user.
    """
    device = context.setup_accelerator()[1]
    created = context.create()
    dtype = created.compute_dtype
    exact = dtype in (torch.float32, torch.float64) and created.alias in ("32-true", "64-true")

    def product() -> torch.Tensor:
        one, other = (torch.randn(64, 64, dtype=dtype, generator=context.generator(i)) for i in range(2))
        return one.to(device) @ other.to(device)

    if exact:
        before, switch = product(), torch.get_float32_matmul_precision()
    trained = PrecisionRun(context)
    if dtype in (torch.float32, torch.float64):
        with trained.precision.forward_context():
            require(not torch.is_autocast_enabled(device.type), f"autocast is on under {dtype}")
            got = product()
        if exact:
            same("torch.get_float32_matmul_precision() after setup()", torch.get_float32_matmul_precision(), switch)
        same("a product", got, before if exact else product())
    if dtype is not torch.float16:
        close(f"what gradients are multiplied by in {dtype}", trained.scale(), 1.0, 1e-3)
