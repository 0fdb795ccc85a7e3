"""Put Intel's fused optimizers in the place of torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError
from torchhal_hpu._optimizer_state import make_portable

_COMMON = frozenset({"foreach", "fused", "capturable", "differentiable"})  # of the implementation, not of the update


def fused(optimizer: Optimizer) -> Optimizer:
    """Return the bridge's fused optimizer over the same parameter groups; ``optimizer`` itself unless on ``hpu``.

    For ``configure_optimizers``, before a scheduler is made of it::

        def configure_optimizers(self):
            return fused(torch.optim.AdamW(self.parameters(), lr=1e-3))

    AdamW, Adam without weight decay, SGD and Adagrad have one. FusedAdamW differs a little from torch's: it adds
    ``eps`` before the bias of the second moment is corrected. State is saved as torch's optimizer would, so that either
    continues with what the other has saved. Groups without parameters are left out (FusedAdamW fails on them).

    Raises:
        ConfigurationError: there is none for this class, an option has no counterpart, or it has stepped already.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kinds = {parameter.device.type for parameter in parameters}
    if "hpu" not in kinds:
        return optimizer
    if any(hasattr(parameter, "placements") for parameter in parameters):
        raise ConfigurationError(
            "fused() takes whole parameters, and these are shares of such (DTensor): its kernels don't know them. Use "
            "torch's own optimizer with this strategy"
        )
    if kinds != {"hpu"}:
        raise ConfigurationError(f"fused() needs all parameters on 'hpu' (got them on {', '.join(sorted(kinds))})")
    name = type(optimizer).__name__
    if type(optimizer) not in _OPTIONS:
        known = ", ".join(cls.__name__ for cls in _OPTIONS)
        raise ConfigurationError(f"there is no fused {name}: fused() takes {known}")
    if any(optimizer.state.values()) and not isinstance(optimizer, torch.optim.Adagrad):
        raise ConfigurationError(f"fused() must come before the first step of {name}: its state can't be taken over")
    groups = [_group(group, name, *_OPTIONS[type(optimizer)]) for group in optimizer.param_groups if group["params"]]
    from habana_frameworks.torch.hpex.optimizers import FusedAdagrad, FusedAdamW, FusedSGD

    made: Optimizer
    if isinstance(optimizer, torch.optim.SGD):
        made = FusedSGD(groups, lr=groups[0]["lr"])
    elif isinstance(optimizer, torch.optim.Adagrad):
        value = optimizer.defaults["initial_accumulator_value"]
        made = FusedAdagrad(groups, lr=groups[0]["lr"], initial_accumulator_value=value)
    else:
        made = FusedAdamW(groups)
    make_portable(made, type(optimizer))
    return made


# Per class: the options that the fused one has, too, and those that must have the one value it computes with.
_OPTIONS: dict[type[Optimizer], tuple[frozenset[str], dict[str, Any]]] = {
    torch.optim.AdamW: (
        frozenset({"lr", "betas", "eps", "weight_decay"}),
        {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True},
    ),
    torch.optim.Adam: (
        frozenset({"lr", "betas", "eps"}),
        {"amsgrad": False, "maximize": False, "weight_decay": 0, "decoupled_weight_decay": False},
    ),
    # with dampening torch's first step is undamped, the fused one's isn't
    torch.optim.SGD: (frozenset({"lr", "momentum", "weight_decay", "nesterov"}), {"dampening": 0, "maximize": False}),
    torch.optim.Adagrad: (
        frozenset({"lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value"}),
        {"maximize": False},
    ),
}


def _group(group: dict[str, Any], name: str, taken: frozenset[str], fixed: dict[str, Any]) -> dict[str, Any]:
    for option, value in fixed.items():
        if option in group and group[option] != value:
            raise ConfigurationError(f"the fused {name} has no {option}={group[option]!r}: it must be {value!r}")
    kept = {option: value for option, value in group.items() if option not in fixed and option not in _COMMON}
    if isinstance(group["lr"], torch.Tensor):
        raise ConfigurationError(f"the fused {name} takes the learning rate as a number (got a tensor)")
    if missing := sorted(taken - kept.keys()):
        raise ConfigurationError(f"a parameter group of {name} has no {', '.join(missing)}")
    return kept
