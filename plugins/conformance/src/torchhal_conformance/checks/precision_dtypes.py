"""PRE: dtypes of weights, inputs and outputs, and the contexts that select them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import UnknownAliasError
from torchhal.resolve import Request, resolve
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._torch_globals import torch_state
from torchhal_conformance.checks._precision_run import PrecisionRun

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
    """convert_module leaves integer, boolean and complex buffers as they are.

    Why: a position index in bfloat16 counts to 256.
    Fix: convert what is_floating_point() and nothing else.
    """
    precision = PrecisionRun(context).precision
    model: Any = precision.convert_module(_Mixed())
    same("the buffers", dict(model.named_buffers()), dict(_Mixed().named_buffers()))
    same("dtype of the weights", model.layer.weight.dtype, precision.param_dtype)


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

    Why: a notebook goes on after an error, in another dtype.
    Fix: restore in __exit__ or finally, whatever happened.
    """
    trained = PrecisionRun(context)
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


def _surroundings(trained: PrecisionRun) -> tuple[torch.dtype, bool]:
    return torch.get_default_dtype(), torch.is_autocast_enabled(trained.device.type)


@check("PRE-06", needs=["device"])
def nested_contexts(context: CheckContext) -> None:
    """forward_context() can be entered again and inside of itself, one object too; autocast is off after the last exit.

    Why: a validation step inside of a training step turned autocast off for the rest of it, or left it on for ever.
    Fix: keep a stack of what to restore.
    """
    trained = PrecisionRun(context)
    precision, before = trained.precision, _surroundings(trained)
    forward = precision.forward_context()
    with forward:
        inside = _surroundings(trained)
        for again in (forward, precision.forward_context()):
            with again:
                same("dtype and autocast in the inner context", _surroundings(trained), inside)
            same("dtype and autocast after the inner context", _surroundings(trained), inside)
    same("dtype and autocast afterwards", _surroundings(trained), before)
    with forward:
        same("dtype and autocast when it is entered again", _surroundings(trained), inside)
    same("dtype and autocast after that", _surroundings(trained), before)


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


@check("PRE-08", needs=["device"])
def outputs(context: CheckContext) -> None:
    """convert_output gives floating-point tensors the default dtype, at any depth, and leaves the rest alone.

    Why: a bfloat16 loss shows three digits in every log.
    Fix: cast to torch.get_default_dtype().
    """
    precision = PrecisionRun(context).precision
    half, whole = torch.rand(3).to(precision.compute_dtype), torch.arange(3)
    converted = precision.convert_output({"loss": half, "nest": [(half,)], "count": whole})
    if precision.compute_dtype is not torch.float64 or precision.param_dtype is torch.float64:
        same("dtype of an output", converted["loss"].dtype, torch.get_default_dtype())
        same("dtype of a deeper output", converted["nest"][0][0].dtype, torch.get_default_dtype())
    require(converted["count"] is whole, "an integer output was converted")


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
        same(f"dtype of the optimizer's state for {name}", moment.dtype, precision.param_dtype)


@check("PRE-23", needs=["device"], after=("PRE-01",))
def evaluation(context: CheckContext) -> None:
    """Evaluation computes in the dtype of training.

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
