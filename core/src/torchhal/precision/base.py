"""The precision contract: which dtypes the model, its inputs and its arithmetic have, and how a step survives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.accelerators import Accelerator
from torchhal.errors import ConfigurationError


class Precision:
    """One precision. Every method is an identity by default, so a subclass overrides only what it changes.

    A caller decides once, before its loop, which methods a subclass overrides and never calls the others. The
    order within one optimizer step is: ``forward_context`` around the step function, ``backward`` (once per
    micro-batch), then once per step ``unscale_gradients``, ``clip_gradients``, ``optimizer_step``.
    """

    alias: str = "32-true"
    """The name users write (PRE-01)."""

    param_dtype: torch.dtype = torch.float32
    """dtype in which the weights are trained; 32-true, the default, leaves to the user to make them so."""

    compute_dtype: torch.dtype = torch.float32
    """dtype of the bulk of the arithmetic."""

    accelerators: ClassVar[frozenset[str] | None] = None
    """Names of the accelerators it works on, whatever these list themselves; None: those that list its alias. One
    that is published under no alias, a user's own class, is not refused by any (STR-37)."""

    features: frozenset[str] = frozenset()
    """``scales_loss``: :meth:`backward` scales the loss, and :meth:`unscale_gradients` undoes it and may skip a step. A
    strategy whose ranks have different gradients, and would decide differently, refuses such a precision."""

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        """Called once per process after the device is set up, before the model is touched."""

    def connect(
        self, model: Any = None, optimizers: Sequence[Any] = (), lr_schedulers: Sequence[Any] = ()
    ) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """A place for vendors whose library wants to see all three at once; gives them back. Identity here.

        Called before training, with the model that the strategy has wrapped. What is returned is used from then on: as
        many optimizers, and schedulers of the same kind, in their places; and the model, one in its place that has its
        steps, or a module around it, whose forward each ``training_step`` then runs through. A model in another's place
        should share its parameters: the user's own object is trained no more.
        """
        return model, optimizers, lr_schedulers

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise TypeError for an optimizer that can't work in this precision (PRE-18, PRE-19)."""

    # -- dtypes ----------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module with parameters in :attr:`param_dtype`, in place; tied ones stay tied (PRE-02, PRE-03)."""
        return module

    def convert_input(self, batch: Any) -> Any:
        """The batch with its floating-point tensors in the model's input dtype; labels untouched (PRE-07)."""
        return batch

    def convert_output(self, output: Any) -> Any:
        """The step's output with floating-point tensors in torch's default dtype (PRE-08)."""
        return output

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Entered while the model builds its parameters; restores what it changes, errors included (PRE-04, PRE-05)."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Entered around every training, validation, test and predict step (PRE-06, PRE-23)."""
        return nullcontext()

    # -- one optimizer step ----------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, *args: Any, through: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        """Accumulate gradients of ``loss``, scaled if this precision scales (PRE-09).

        ``through`` is called with the (scaled) loss and the other arguments in place of ``loss.backward``: a model's
        own ``backward``.
        """
        if through is not None:
            through(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Bring the gradients back to true size; once per step however often it is called (PRE-12)."""

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Clip the unscaled gradients of ``optimizer`` in place (PRE-10, PRE-11).

        Args:
            optimizer: the one whose parameters are clipped.
            clip_val: greatest global 2-norm (``"norm"``) or greatest absolute value (``"value"``).
            algorithm: ``"norm"`` or ``"value"``.

        Returns:
            The global norm before clipping, 0-d, for ``"norm"``; None for ``"value"``. Strategies that shard
            parameters compute it over all shards in their own ``clip_gradients``.
        """
        if algorithm not in ("norm", "value"):
            raise ValueError(f"'algorithm' must be 'norm' or 'value' (got {algorithm!r})")
        parameters = list(self.main_params(optimizer))
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            return _clip_with_sparse(parameters, clip_val, algorithm)
        if algorithm == "norm":
            return nn.utils.clip_grad_norm_(parameters, clip_val)
        nn.utils.clip_grad_value_(parameters, clip_val)
        return None

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Each parameter of ``optimizer`` exactly once (PRE-22)."""
        seen: set[int] = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Run ``optimizer.step``; True if the parameters were updated, False if the step was skipped (PRE-13, PRE-14).

        With a ``closure``, it runs inside ``optimizer.step(closure)``: forward, backward and clipping included.
        """
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`load_state_dict` continues from, bit for bit (PRE-16, PRE-17)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`'s value."""

    def teardown(self) -> None:
        """Undo every global change: default dtype, matmul precision, patches (PRE-24). Idempotent."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.alias!r})"


def connected(
    precision: Precision, model: Any, optimizers: list[Any], lr_schedulers: list[Any]
) -> tuple[Any, list[Any], list[Any]]:
    """What ``precision.connect`` gives back for them.

    Raises:
        ConfigurationError: it gives back something else than a model, optimizers and schedulers.
    """
    answer = precision.connect(model, optimizers, lr_schedulers)
    rule = f"{type(precision).__name__}.connect must return (model, optimizers, lr_schedulers)"
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ConfigurationError(f"{rule} (got {answer!r})")
    made, steppers, schedulers = answer[0], list(answer[1]), list(answer[2])
    if (len(steppers), len(schedulers)) != (len(optimizers), len(lr_schedulers)):
        raise ConfigurationError(
            f"{rule}, as many as it was given: {len(optimizers)} optimizer(s) and {len(lr_schedulers)} scheduler(s) "
            f"(got {len(steppers)} and {len(schedulers)})"
        )
    for before, optimizer in zip(optimizers, steppers, strict=True):
        lacks = [name for name in ("step", "zero_grad", "param_groups", "state_dict") if not hasattr(optimizer, name)]
        if lacks and optimizer is not before:
            raise ConfigurationError(f"{rule}: its {type(optimizer).__name__} is no optimizer, it has no {lacks[0]!r}")
    for before, scheduler in zip(lr_schedulers, schedulers, strict=True):
        if hasattr(before, "scheduler") and not hasattr(scheduler, "scheduler"):
            raise ConfigurationError(
                f"{rule}: a scheduler comes as a {type(before).__name__}, whose attribute 'scheduler' may be replaced "
                f"(got a {type(scheduler).__name__})"
            )
    return made, steppers, schedulers


def needs_closure(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` can't do without a closure, which it then evaluates as often as it likes (LBFGS)."""
    # The class's: what a scheduler puts on the instance shows ``self`` as an argument.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of ``parameter``, which has one; of a sparse one its values, which share its memory."""
    if not parameter.grad.is_sparse:  # type: ignore[union-attr]
        return parameter.grad  # type: ignore[return-value]
    parameter.grad = parameter.grad.coalesce()  # type: ignore[union-attr]
    return parameter.grad._values()


def _clip_with_sparse(parameters: Sequence[nn.Parameter], clip_val: float, algorithm: str) -> torch.Tensor | None:
    """torch's own clipping knows no sparse gradients: here the values of coalesced ones stand in for them."""
    stand_ins = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        values = dense_gradient(parameter)
        stand_in = nn.Parameter(values, requires_grad=False)
        stand_in.grad = values
        stand_ins.append(stand_in)
    if algorithm == "norm":
        return nn.utils.clip_grad_norm_(stand_ins, clip_val)
    nn.utils.clip_grad_value_(stand_ins, clip_val)
    return None
