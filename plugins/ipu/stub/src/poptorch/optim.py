"""The device's optimizers: torch's, with what the device knows beside them. Their state lies on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class VariableAttributes:
    def __init__(self, variable_attributes: list[str], allowed_attributes: list[str]) -> None:
        self._variable = set(variable_attributes)
        self._allowed = set(allowed_attributes)

    def isConstant(self, attr: str) -> bool:
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        assert attr in self._allowed, f"{attr!r} must be one of {sorted(self._allowed)}"
        self._variable.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        assert attr in self._allowed, f"{attr!r} must be one of {sorted(self._allowed)}"
        self._variable.add(attr)


_STATE = ("ipu_state", "ipu_param")


class Optimizer:
    """What all of them share: state that lies on the device, and on the host between two stays there."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = dict.fromkeys(_STATE)
        self._unsent = False
        """Whether what is kept was loaded, and the device hasn't got it yet."""
        self._fetch: Callable[[], dict[str, Any]] | None = None
        """Asks the executor that uses this optimizer."""

    def state_dict(self) -> dict[str, Any]:
        if self._fetch is not None and not self._unsent:
            self._kept = self._fetch()
        return self.get_state_dict()

    def get_state_dict(self) -> dict[str, Any]:
        return {**self._kept, **torch.optim.Optimizer.state_dict(self)}  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.load_state_dict(self, state)  # type: ignore[arg-type]
        self.set_state_dict(state)

    def set_state_dict(self, state: dict[str, Any]) -> None:
        if missing := [name for name in _STATE if name not in state]:
            raise RuntimeError(f"the state is not one of an IPU's optimizer: it has no {' and no '.join(missing)}")
        self._kept = {name: state[name] for name in _STATE}
        self._unsent = True

    def has_state(self) -> bool:
        return None not in self._kept.values()

    def _extend(self, given: dict[str, Any], **own: Any) -> None:
        """``own``: attributes that torch's optimizer hasn't, with what None stands for."""
        variable = [name for name, value in given.items() if value is not None]
        for name, default in own.items():
            value = given.get(name)
            value = default if value is None else value
            assert not name.endswith("accum_type") or value in (torch.float16, torch.float32), (
                f"{name!r} must be torch.float16 or torch.float32 (got {value})"
            )
            setattr(self, name, value)
        allowed = [*self.defaults, "loss_scaling"]  # type: ignore[attr-defined]
        self.variable_attrs = VariableAttributes(variable, allowed)


def _given(arguments: dict[str, Any], *left_out: str) -> dict[str, Any]:
    names = {"self", "__class__", *left_out}
    return {name: value for name, value in arguments.items() if name not in names and value is not None}


class SGD(Optimizer, torch.optim.SGD):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        own = ("loss_scaling", "velocity_scaling", "use_combined_accum", "accum_type", "velocity_accum_type",
               "max_grad_norm")  # fmt: skip
        given = dict(locals())
        Optimizer.__init__(self)
        torch.optim.SGD.__init__(self, **_given(given, "own", *own))
        self._extend(
            _given(given, "own", "params"), loss_scaling=1.0, use_combined_accum=False, accum_type=torch.float32,
            velocity_accum_type=torch.float32, max_grad_norm=float("inf"),
        )  # fmt: skip


class Adam(Optimizer, torch.optim.Adam):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        own = ("loss_scaling", "accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type",
               "max_grad_norm")  # fmt: skip
        given = dict(locals())
        Optimizer.__init__(self)
        torch.optim.Adam.__init__(self, **_given(given, "own", *own))
        self._extend(
            _given(given, "own", "params"), loss_scaling=1.0, accum_type=torch.float32,
            first_order_momentum_accum_type=torch.float32, second_order_momentum_accum_type=torch.float32,
            max_grad_norm=float("inf"),
        )  # fmt: skip


class AdamW(Optimizer, torch.optim.AdamW):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        own = ("loss_scaling", "bias_correction", "accum_type", "first_order_momentum_accum_type",
               "second_order_momentum_accum_type", "max_grad_norm")  # fmt: skip
        given = dict(locals())
        assert bias_correction in (None, True), "the stub has no AdamW without bias correction"
        Optimizer.__init__(self)
        torch.optim.AdamW.__init__(self, **_given(given, "own", *own))
        self._extend(
            _given(given, "own", "params"), loss_scaling=1.0, bias_correction=True, accum_type=torch.float32,
            first_order_momentum_accum_type=torch.float32, second_order_momentum_accum_type=torch.float32,
            max_grad_norm=float("inf"),
        )  # fmt: skip


class RMSprop(Optimizer, torch.optim.RMSprop):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        own = ("loss_scaling", "accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type",
               "use_tf_variant")  # fmt: skip
        given = dict(locals())
        assert not use_tf_variant, "the stub has no RMSprop of TensorFlow's"
        Optimizer.__init__(self)
        torch.optim.RMSprop.__init__(self, **_given(given, "own", *own))
        self._extend(
            _given(given, "own", "params"), loss_scaling=1.0, accum_type=torch.float32,
            first_order_momentum_accum_type=torch.float32, second_order_momentum_accum_type=torch.float32,
            use_tf_variant=False,
        )  # fmt: skip
