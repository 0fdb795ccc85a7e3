"""Make the device's optimizer for the user's: the same numbers, and state that lies on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError

_ARGUMENTS = {
    torch.optim.SGD: ("SGD", ("momentum", "dampening", "weight_decay", "nesterov")),
    torch.optim.Adam: ("Adam", ("betas", "eps", "weight_decay")),
    torch.optim.AdamW: ("AdamW", ("betas", "eps", "weight_decay")),
    torch.optim.RMSprop: ("RMSprop", ("alpha", "eps", "weight_decay", "momentum", "centered")),
}
_REFUSED = ("maximize", "amsgrad", "differentiable", "decoupled_weight_decay")
_CLIPPED = ("SGD", "Adam", "AdamW")
_OPTION = "it can change if one of torch's optimizers isn't made with 0 for it, or one of poptorch.optim with a number"
_VARIABLE = {
    "max_grad_norm": "leave it as it is",
    "loss_scaling": "it can change if IPUMixedPrecision, or one of poptorch.optim, is made with a number for it",
}


def on_device(optimizer: Optimizer, *, clip_val: float | None, loss_scaling: float | None) -> Any:
    """Return a ``poptorch.optim`` optimizer with the very same parameter groups, so that schedulers reach them.

    Args:
        optimizer: torch's SGD, Adam, AdamW or RMSprop, or one of ``poptorch.optim``, which is taken as it is.
        clip_val: greatest global norm of the gradients; None: they are not clipped.
        loss_scaling: for an optimizer of torch's; None: 1.

    Raises:
        ModelError: the device has no such optimizer, or not with this option.
        ConfigurationError: it can't clip, or is told two norms.
    """
    import poptorch

    if isinstance(optimizer, poptorch.optim.Optimizer):
        made: Any = optimizer
        if loss_scaling is not None and made.loss_scaling == 1.0:
            made.loss_scaling = loss_scaling
    else:
        made = _converted(optimizer, loss_scaling)
    if clip_val is not None:
        _clip(made, clip_val)
    return made


def _converted(optimizer: Optimizer, loss_scaling: float | None) -> Any:
    import poptorch

    name = type(optimizer).__name__
    if type(optimizer) not in _ARGUMENTS:
        known = ", ".join(cls.__name__ for cls in _ARGUMENTS)
        raise ModelError(f"IPUs have no {name}: use torch's {known}, or one of poptorch.optim")
    for group in optimizer.param_groups:
        for option in _REFUSED:
            if group.get(option) and not (
                option == "decoupled_weight_decay" and isinstance(optimizer, torch.optim.AdamW)
            ):
                raise ModelError(f"IPUs have no {name} with {option}=True: leave it out")
        if any(isinstance(value, torch.Tensor) for value in group.values()):
            raise ModelError(f"the options of {name} must be numbers on IPUs, not tensors: pass lr as a float")
    if any(optimizer.state.values()):
        raise ModelError(
            f"{name} has stepped before, and its state can't go to the IPU: make it anew in configure_optimizers"
        )
    kind, arguments = _ARGUMENTS[type(optimizer)]
    defaults = optimizer.defaults
    # what is left out is a constant in the compiled graph, which no scheduler could change
    chosen = {key: defaults[key] for key in arguments if any(group[key] for group in optimizer.param_groups)}
    groups = [dict(group) for group in optimizer.param_groups]
    made = getattr(poptorch.optim, kind)(groups, lr=defaults["lr"], loss_scaling=loss_scaling, **chosen)
    made.param_groups = optimizer.param_groups
    return made


def _clip(made: Any, clip_val: float) -> None:
    import poptorch

    kinds = tuple(getattr(poptorch.optim, kind) for kind in _CLIPPED)
    if not isinstance(made, kinds):
        raise ConfigurationError(
            f"IPUs clip gradients in {', '.join(_CLIPPED)}, not in {type(made).__name__}: leave 'gradient_clip_val' "
            f"out (got {clip_val})"
        )
    own = made.max_grad_norm
    if own != float("inf") and own != clip_val:
        raise ConfigurationError(
            f"the gradient norm is limited twice: {own} by the optimizer's max_grad_norm, and {clip_val} by "
            "gradient_clip_val; leave one of them out"
        )
    made.max_grad_norm = float(clip_val)


def values(optimizer: Any) -> list[dict[str, Any]]:
    """Return what the device receives of an optimizer, to compare later.

    Its own attributes come first, then the options of each parameter group.
    """
    own = {name: getattr(optimizer, name) for name in ("loss_scaling", "max_grad_norm") if hasattr(optimizer, name)}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [own, *groups]


def check_change(optimizer: Any, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Refuse a change of an optimizer that the compiled step can't follow.

    Args:
        optimizer: one of ``poptorch.optim``.
        before: its :func:`values` when the step was compiled.
        now: the same of today.

    Raises:
        ModelError: something has changed that is a constant of the compiled step.
    """
    known = {*optimizer.defaults, "loss_scaling"}
    for old, new in zip(before, now, strict=False):
        for name, value in new.items():
            if name in old and old[name] == value:
                continue
            if name == "max_grad_norm" or (name in known and optimizer.variable_attrs.isConstant(name)):
                raise ModelError(
                    f"{name!r} of {type(optimizer).__name__} is a constant of the compiled step, and was changed from "
                    f"{old.get(name)} to {value}: {_VARIABLE.get(name, _OPTION)}"
                )


def load(optimizer: Any, state: dict[str, Any]) -> None:
    """Call ``optimizer.load_state_dict(state)`` and keep the groups that schedulers know."""
    shared = optimizer.param_groups
    optimizer.load_state_dict(state)
    for group, loaded in zip(shared, optimizer.param_groups, strict=True):
        group.update({name: value for name, value in loaded.items() if name != "params"})
    optimizer.param_groups = shared
