"""The optimizer on the device: it has the settings that it was last told, and its state lies there."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

_SETTINGS = {
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    torch.optim.AdamW: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.Adam: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.RMSprop: ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
}
"""By class, the more special first: AdamW is an Adam in newer versions of torch."""
_CLIPPED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def kind(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class whose update an optimizer makes.

    Raises:
        AssertionError: an optimizer that the device doesn't know.
    """
    for cls in _SETTINGS:
        if isinstance(optimizer, cls):
            return cls
    names = ", ".join(cls.__name__ for cls in _SETTINGS)
    raise AssertionError(f"the device has {names} (got {type(optimizer).__name__})")


def settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return what the device is told of an optimizer.

    Raises:
        ValueError: ``amsgrad``.
    """
    names = _SETTINGS[kind(optimizer)]
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError("the device has no amsgrad")
    clipped = isinstance(optimizer, _CLIPPED)
    return {
        "type": kind(optimizer),
        "loss_scaling": float(getattr(optimizer, "loss_scaling", 1.0)),
        "max_grad_norm": float(getattr(optimizer, "max_grad_norm", float("inf"))) if clipped else float("inf"),
        "groups": [{name: group[name] for name in names} for group in optimizer.param_groups],
    }


class Updates:
    """The updates that the device makes of its weights.

    Args:
        optimizer: over parameters of the host.
        names: of these, by ``id``.
        weights: of the device, by name; updated in place.
        told: the settings it starts with.
    """

    def __init__(
        self, optimizer: Optimizer, names: dict[int, str], weights: dict[str, torch.Tensor], told: dict[str, Any]
    ) -> None:
        self.names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        self._weights = weights
        self._make(told)

    def _make(self, told: dict[str, Any]) -> None:
        groups = [
            {"params": [self._weights[name] for name in group], **values}
            for group, values in zip(self.names, told["groups"], strict=True)
        ]
        self.told = told
        self._optimizer = told["type"](groups, lr=0.0)

    def tell(self, told: dict[str, Any]) -> None:
        if told["type"] is not self.told["type"]:
            self._make(told)
            return
        for group, values in zip(self._optimizer.param_groups, told["groups"], strict=True):
            group.update(values)
        self.told = told

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        """Update the weights that have a gradient; their gradients are of the scaled loss."""
        for group, parameters in zip(self.names, self._optimizer.param_groups, strict=True):
            for name, parameter in zip(group, parameters["params"], strict=True):
                gradient = gradients.get(name)
                parameter.grad = (
                    None if gradient is None else (gradient / self.told["loss_scaling"]).to(parameter.dtype)
                )
        everything = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if self.told["max_grad_norm"] < float("inf"):
            torch.nn.utils.clip_grad_norm_(everything, self.told["max_grad_norm"])
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """``ipu_state`` and ``ipu_param``, by the names of tensors on the device."""
        state: dict[str, torch.Tensor] = {}
        for group, parameters in zip(self.names, self._optimizer.param_groups, strict=True):
            for name, parameter in zip(group, parameters["params"], strict=True):
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        state[f"{key}___{name}"] = torch.as_tensor(value).detach().clone()
        return {"ipu_state": state, "ipu_param": {"lossScaling": torch.tensor(self.told["loss_scaling"])}}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        by_name = {
            name: parameter
            for group, parameters in zip(self.names, self._optimizer.param_groups, strict=True)
            for name, parameter in zip(group, parameters["params"], strict=True)
        }
        self._optimizer.state.clear()
        for full_name, value in state["ipu_state"].items():
            key, _, name = full_name.partition("___")
            self._optimizer.state.setdefault(by_name[name], {})[key] = value.clone()
