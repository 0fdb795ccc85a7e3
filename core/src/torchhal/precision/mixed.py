"""float32 weights, arithmetic in a half-width dtype: ``bf16-mixed``, and ``16-mixed`` with a scaled loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchhal.accelerators import Accelerator
from torchhal.composition import Composition
from torchhal.errors import CheckpointMismatchError, UnsupportedCombinationError
from torchhal.precision._casting import cast_module, parse_dtype, widen_tensors
from torchhal.precision.base import Precision, needs_closure

_ALIASES: Final = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}
_HALF: Final = (torch.bfloat16, torch.float16)
_STATE_KEYS: Final = frozenset(GradScaler("cpu").state_dict())

# torch's autocast keeps each weight's cast for the rest of the context, which spares recurrent layers a cast per
# time step. Older versions keep one made under no_grad as well: a later forward with gradients in the same step
# then leaves the weight without one, silently. Correct in 2.13; earlier versions run without the cache.
_CACHE_WEIGHTS: Final = torch.__version__ >= "2.13"  # compares as versions do


class MixedPrecision(Precision):
    """Autocast around every step; for float16 also a gradient scaler.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``, or the ``torch.dtype``: what autocast computes in.
        scaler: for float16, a scaler of your own; otherwise ``torch.amp.GradScaler`` at its defaults.

    Several optimizers share the one scale, as in torch's recipe, and skip their steps independently. The scale
    changes at the first :meth:`backward` after a step, not within the step: gradients that another optimizer got
    under the old scale are still to be unscaled by it. So an optimizer must not accumulate over several backward
    passes while another one steps in between.
    """

    param_dtype = torch.float32
    wraps_autocast = True

    def __init__(self, dtype: str | torch.dtype = "bfloat16", scaler: GradScaler | None = None) -> None:
        self.compute_dtype = parse_dtype(dtype, _ALIASES)
        self.alias = _ALIASES[self.compute_dtype]
        if scaler is not None and self.compute_dtype is not torch.float16:
            raise ValueError(f"'scaler' must be None for {self.alias!r}, which scales nothing (got {scaler!r})")
        if scaler is not None and not scaler.is_enabled():
            raise ValueError(
                f"'scaler' must be enabled, or gradients underflow in {self.alias!r} (got {scaler!r}); torch disables "
                "one that was made for a device it doesn't have: name the device type, GradScaler(device_type)"
            )
        if self.compute_dtype is torch.float16:
            self.features = frozenset({"scales_loss"})
        self.scaler = scaler
        """The gradient scaler; None for bfloat16, and before :meth:`setup`."""
        self._own_scaler = scaler is None
        self._device_type: str | None = None
        self._restored: dict[str, Any] = {}  # a state that was loaded before there was a scaler
        # Of the current step, by id: the optimizers whose gradients are unscaled, and those that have stepped.
        self._unscaled: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()
        self._scaled = False  # whether gradients were made under the current scale

    def check_fit(self, composition: Composition) -> None:
        """Raise UnsupportedCombinationError where torch has no autocast for the accelerator's type of device.

        Whether it has one to this dtype is found in :meth:`setup`: on some devices the question starts them.
        """
        if not torch.amp.is_autocast_available(composition.accelerator.device_type):
            self._refuse(composition.accelerator)

    def _refuse(self, accelerator: Accelerator) -> NoReturn:
        raise UnsupportedCombinationError(
            f"precision {self.alias!r} doesn't fit accelerator {accelerator.name!r}: torch has no autocast to "
            f"{self.compute_dtype} for device type {accelerator.device_type!r}; use '32-true'"
        )

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        """Bind autocast and the scaler to the device's type; a scaler from an earlier run keeps its scale.

        Raises:
            UnsupportedCombinationError: torch has no such autocast for this type of device.
        """
        kind = accelerator.device_type
        if not torch.amp.is_autocast_available(kind) or not _autocasts(kind, self.compute_dtype):
            self._refuse(accelerator)
        if self.compute_dtype is torch.float16 and self._own_scaler and kind != self._device_type:
            state = self.state_dict()
            self.scaler = GradScaler(kind)
            if not self.scaler.is_enabled():
                raise UnsupportedCombinationError(
                    f"precision {self.alias!r} doesn't fit accelerator {accelerator.name!r}: torch has no gradient "
                    f"scaler for device type {kind!r}; use 'bf16-mixed' or '32-true'"
                )
            if state:
                self.scaler.load_state_dict(state)
        self._device_type = kind

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse, for float16, optimizers that evaluate a closure or unscale by a protocol removed from torch."""
        if self.compute_dtype is not torch.float16:
            return
        name, instead = type(optimizer).__name__, "use 'bf16-mixed' or '32-true', or another optimizer"
        if needs_closure(optimizer):
            raise TypeError(
                f"precision {self.alias!r} doesn't work with optimizer {name}: its step() evaluates a closure as often "
                f"as it likes, and gradients can't be unscaled and checked in between; {instead}"
            )
        scales = "grad_scaler" in inspect.signature(type(optimizer).step).parameters
        if getattr(optimizer, "_step_supports_amp_scaling", False) and scales:
            raise TypeError(
                f"precision {self.alias!r} doesn't work with optimizer {name}: its step(grad_scaler=...) unscales by "
                f"itself, so gradients can't be clipped and a skipped step can't be seen; {instead}"
            )
        if any(parameter.dtype is torch.float16 for parameter in self.main_params(optimizer)):
            raise TypeError(
                f"precision {self.alias!r} doesn't work with optimizer {name} over float16 parameters: float32 weights "
                "are what it scales gradients for; make the model float32, or use '16-true'"
            )

    # -- dtypes ----------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert trainable parameters of half width to float32: an update is too small for them.

        Frozen ones stay as they are, as autocast reads them in any width and a large backbone in float32 would
        take twice the memory. Buffers and float64 stay too.

        Checks: PRE-20.
        """
        return cast_module(module, torch.float32, only=lambda p: p.requires_grad and p.dtype in _HALF)

    def convert_output(self, output: Any) -> Any:
        return widen_tensors(output, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[Any]:
        if self._device_type is None:
            raise RuntimeError(f"setup() must come before forward_context() of precision {self.alias!r}")
        return _Autocast(self._device_type, self.compute_dtype)

    # -- one optimizer step ----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate gradients of ``loss`` times the scale.

        Raises:
            RuntimeError: scaled gradients were added to unscaled ones that were neither stepped with nor cleared.

        Checks: PRE-09.
        """
        if self.scaler is None:
            self._outside_autocast(super().backward, loss, *args, **kwargs)
            return
        waiting = [o for key, o in self._unscaled.items() if key not in self._stepped and _has_gradients(o)]
        if self._unscaled and not waiting:
            self._end_step()
        before = [_gradient_versions(optimizer) for optimizer in waiting]
        self._scaled = True
        self._outside_autocast(super().backward, self.scaler.scale(loss), *args, **kwargs)
        for optimizer, versions in zip(waiting, before, strict=True):
            if _gradient_versions(optimizer) != versions:
                raise RuntimeError(
                    f"backward() added scaled gradients to those of {type(optimizer).__name__} that were unscaled "
                    "already: unscale or clip after the last backward() of a step, and clear the gradients of a step "
                    "that is left out with zero_grad()"
                )

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale; once per step however often it is called.

        Raises:
            RuntimeError: there are gradients, but no :meth:`backward` made them.

        Checks: PRE-12.
        """
        if self.scaler is None or id(optimizer) in self._unscaled or not _has_gradients(optimizer):
            return
        if not self._scaled:
            raise RuntimeError(
                f"the gradients of {type(optimizer).__name__} are not scaled by the current scale: under precision "
                f"{self.alias!r} they must come from its backward(), and a checkpoint must not be taken between that "
                "and the step"
            )
        self.scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = optimizer

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        self.unscale_gradients(optimizer)
        return super().clip_gradients(optimizer, clip_val, algorithm)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step unless a gradient is infinite or NaN; return False if the step was skipped.

        For float16 a ``closure`` runs once, before the step rather than inside it: the gradients must be known to
        be finite before the optimizer reads them. An optimizer without any gradient steps without a check, unless
        :meth:`unscale_gradients` has found gradients since.

        Raises:
            RuntimeError: this optimizer has stepped already since the last :meth:`backward`.

        Checks: PRE-13, PRE-14.
        """
        if self._device_type is None or not torch.is_autocast_enabled(self._device_type):
            return self._step(optimizer, closure)
        # Inside a training step with manual optimization. The closure belongs to the step, the update doesn't.
        if closure is not None:
            evaluate = closure

            def closure() -> Any:
                torch.clear_autocast_cache()  # the optimizer may have moved the weights since the last evaluation
                with self.forward_context():
                    return evaluate()

        stepped = bool(self._outside_autocast(self._step, optimizer, closure))
        torch.clear_autocast_cache()  # it holds casts of the weights before the update
        return stepped

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        if self.scaler is None:
            return super().optimizer_step(optimizer, closure)
        if closure is not None:
            with torch.enable_grad():
                closure()
        # one that has a share of its parameters now, perhaps without a gradient, steps as all of them allow
        if not _has_gradients(optimizer) and id(optimizer) not in self._unscaled:
            return super().optimizer_step(optimizer)
        if id(optimizer) in self._stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__} has stepped already: under precision {self.alias!r} there must be a "
                "backward() between two steps, and another optimizer whose gradients were unscaled must step, or have "
                "them cleared, before it"
            )
        self.unscale_gradients(optimizer)
        stepped = _scaler_step(self.scaler, optimizer)
        self._stepped.add(id(optimizer))
        return stepped

    def _outside_autocast(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it as outside of the step: gradients and updates must not run under autocast."""
        if self._device_type is None or not torch.is_autocast_enabled(self._device_type):
            return function(*args, **kwargs)
        with torch.autocast(self._device_type, enabled=False):
            return function(*args, **kwargs)

    def _end_step(self) -> None:
        """Update the scale from the results of the steps."""
        assert self.scaler is not None
        self.scaler.update()
        self._unscaled.clear()
        self._stepped.clear()
        self._scaled = False

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's scale, factors and growth count, as numbers; empty for bfloat16.

        Checks: PRE-16, PRE-17.
        """
        if self.scaler is None:
            return dict(self._restored)
        if self._stepped and self._stepped == self._unscaled.keys():
            self._end_step()  # the last step's result is part of the state
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`'s value. An empty one, of a run that scaled nothing, changes nothing.

        Raises:
            CheckpointMismatchError: the state is not that of a gradient scaler.
        """
        if self.compute_dtype is not torch.float16 or not state:
            return
        known = _STATE_KEYS if self.scaler is None else self.scaler.state_dict().keys()
        if missing := sorted(known - state.keys()):
            raise CheckpointMismatchError(
                f"the state doesn't belong to precision {self.alias!r}: it lacks {missing} (got {sorted(state)})"
            )
        if self.scaler is None:
            self._restored = dict(state)
            return
        if self._unscaled:
            self._end_step()
        self.scaler.load_state_dict(state)

    def teardown(self) -> None:
        """Discard an unfinished step; the scale is kept for another run.

        Checks: PRE-24.
        """
        if self._unscaled:
            self._end_step()
        self._scaled = False


class _Autocast:
    """``torch.autocast``, but one object may be entered while it is entered: torch's loses the state to restore."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._arguments = (device_type, dtype)
        self._entered: list[torch.autocast] = []

    def __enter__(self) -> None:
        device_type, dtype = self._arguments
        context = torch.autocast(device_type, dtype, cache_enabled=None if _CACHE_WEIGHTS else False)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _autocasts(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether autocast is really enabled: for an unsupported dtype it only warns."""
    with torch.autocast(device_type, dtype):
        return torch.is_autocast_enabled(device_type)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _gradient_versions(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return numbers that change whenever a gradient was written to or replaced."""
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def _scaler_step(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Call ``scaler.step(optimizer)`` and return its result, and whether the optimizer took the step.

    The scaler doesn't return that, and reading it from the scaler costs a second wait for the device. It calls
    ``optimizer.step`` only if all gradients were finite, so that is replaced by a recorder during this call. Optimizers
    that skip inside their own kernel are always called, with the result in ``found_inf``: reading it is the one wait
    that the scaler has saved, and they then count as skipped like the others.
    """
    stepped = False
    step = optimizer.step
    before = vars(optimizer).get("step")  # a scheduler's counter, or a compiled step

    def record(*args: Any, **kwargs: Any) -> Any:
        nonlocal stepped
        found_inf = getattr(optimizer, "found_inf", None)
        stepped = found_inf is None or not found_inf.item()
        return step(*args, **kwargs) if stepped else None

    optimizer.step = record  # type: ignore[method-assign]
    try:
        scaler.step(optimizer)
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before  # type: ignore[method-assign]
    return stepped
