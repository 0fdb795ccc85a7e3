"""Train on one card, or in one process per card: torch's strategies, with options of the bridge's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy, Strategy


class _WithVendorParts(Strategy):
    """The options of the bridge's that its strategies have in common.

    Args:
        fused_clip_norm: clip by norm with the bridge's ``FusedClipNorm``.
        compile: compile the model's ``forward`` with ``torch.compile(backend="hpu_backend")``, in place and for the
            run; a mapping gives further arguments of ``torch.compile``. Eager mode only.
        options: see the strategy.
    """

    accelerators: ClassVar[frozenset[str] | None] = frozenset({"hpu"})

    def __init__(
        self, *, fused_clip_norm: bool = False, compile: bool | Mapping[str, Any] = False, **options: Any
    ) -> None:
        if not isinstance(fused_clip_norm, bool):
            raise ConfigurationError(f"'fused_clip_norm' must be a bool (got {fused_clip_norm!r})")
        if not isinstance(compile, bool | Mapping):
            raise ConfigurationError(f"'compile' must be a bool or torch.compile's arguments (got {compile!r})")
        super().__init__(**options)
        self.fused_clip_norm = fused_clip_norm
        self.compile_options = dict(compile) if isinstance(compile, Mapping) else {} if compile else None
        self._clippers: dict[tuple[int, float], Any] = {}
        self._compiled: nn.Module | None = None

    def wrap_model(self, *, training: bool) -> None:
        if self.compile_options is not None:
            self._compile()
        super().wrap_model(training=training)

    def _compile(self) -> None:
        if self.mark_step is not None:
            raise ConfigurationError(
                "'compile' needs eager mode, and the bridge runs in lazy mode: set PT_HPU_LAZY_MODE=0 before the "
                "process starts"
            )
        assert self.module is not None and self.compile_options is not None
        if type(self.module).forward is nn.Module.forward:
            raise ModelError(
                f"'compile' compiles forward, and {type(self.module).__name__} has none: let training_step call self() "
                "on a forward, or compile its parts, self.body.compile(backend='hpu_backend')"
            )
        self.module.compile(**{"backend": "hpu_backend", **self.compile_options})
        self._compiled = self.module

    def marked(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that is preceded by a mark unless it trains, where the bridge places marks."""
        mark = self.mark_step
        if mark is None or name == "training_step":
            return step

        def mark_and(*args: Any) -> Any:
            mark()
            return step(*args)

        return mark_and

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        if not self.fused_clip_norm or algorithm != "norm":
            return super().clip_gradients(optimizer, clip_val, algorithm)
        from habana_frameworks.torch.hpex.normalization import FusedClipNorm

        self.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        key = id(optimizer), float(clip_val)
        if key not in self._clippers:
            self._clippers[key] = FusedClipNorm(parameters, clip_val)
        norm: torch.Tensor = self._clippers[key].clip_norm(parameters)
        return norm.reshape(())

    def release_model(self) -> None:
        self._clippers.clear()
        if self._compiled is not None:
            self._compiled._compiled_call_impl = None
            self._compiled = None
        super().release_model()


class HPUSingleStrategy(_WithVendorParts, SingleDeviceStrategy):
    __doc__ = f"""Training on one card.
    {_WithVendorParts.__doc__}"""


class HPUParallelStrategy(_WithVendorParts, DDPStrategy):
    __doc__ = f"""One process per card, gradients averaged by DistributedDataParallel over HCCL.
    {_WithVendorParts.__doc__}"""
