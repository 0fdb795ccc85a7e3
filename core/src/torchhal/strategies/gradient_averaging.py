"""The base of data parallel strategies that average gradients themselves, without torch's DistributedDataParallel.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch.optim import Optimizer

from torchhal.distributed import collectives
from torchhal.errors import ConfigurationError, DistributedError
from torchhal.strategies._steps import around_call
from torchhal.strategies.parallel import ParallelStrategy

__all__ = ["GradientAveragingStrategy"]

_SHOWN = 8  # names of parameters in a message


class GradientAveragingStrategy(ParallelStrategy):
    """A replica per rank, as under ``ddp``, of which a subclass averages the gradients.

    Before a training step every rank has rank 0's buffers, when ``DistributedDataParallel`` would send them. A
    subclass averages gradients in :meth:`backward`, unless :attr:`averaging_is_paused`, and in
    :meth:`sync_gradients`. It leaves out what :meth:`parameters_to_ignore` names, or refuses it
    (:func:`.model_checks.check_none_ignored`).

    Args:
        find_unused_parameters: allow parameters that a step does not use.
        options: those of :class:`ParallelStrategy`.

    Raises:
        ConfigurationError: ``find_unused_parameters`` is no bool.
    """

    compares_replicas: ClassVar[bool] = True
    synchronizes_batchnorms: ClassVar[bool] = True

    def __init__(self, *, find_unused_parameters: bool = False, **options: Any) -> None:
        if not isinstance(find_unused_parameters, bool):
            raise ConfigurationError(f"'find_unused_parameters' must be a bool (got {find_unused_parameters!r})")
        super().__init__(**options)
        self.find_unused_parameters = find_unused_parameters
        self.averaging_is_paused = False
        """True while gradients are accumulated, and not sent: under no_backward_sync() and manual optimization."""
        self._sends_buffers = True
        """True if the next training step begins with rank 0's buffers."""

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self._sends_buffers = True
        # the backward passes of manual optimization are averaged after each, by sync_gradients()
        self.averaging_is_paused = not self.automatic_optimization

    def restore_module(self) -> None:
        super().restore_module()
        self.send_buffers()

    def parameters_to_ignore(self) -> Collection[str]:
        """Return the names that ``DistributedDataParallel`` was given to ignore: each rank has its own of these."""
        names: Collection[str] = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return names

    def module_step(self, name: str) -> Callable[..., Any]:
        step = super().module_step(name)
        return self._with_buffers(step) if name == "training_step" else step

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        call = super().module_call(forward, training=training)
        return around_call(call, self._with_buffers) if training else call

    def _with_buffers(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self.world_size == 1 or not self.automatic_optimization:
            return step

        def with_buffers(*args: Any) -> Any:
            """Run the step with rank 0's buffers, unless the one before it was in an accumulation.

            When is as in DistributedDataParallel's forward (``require_forward_param_sync``).
            """
            if self._sends_buffers:
                self.send_buffers()
            output = step(*args)
            self._sends_buffers = not self.averaging_is_paused
            return output

        return with_buffers

    def send_buffers(self) -> None:
        """Give every rank the buffers of rank 0, those that :meth:`parameters_to_ignore` names left out."""
        if self.module is None or self.world_size == 1:
            return
        ignored = set(self.parameters_to_ignore())
        # ``data``: a graph that has saved a buffer may still run backward, as under DistributedDataParallel
        buffers = [buffer.data for name, buffer in self.module.named_buffers() if name not in ignored]
        with self.guard("broadcast of the buffers"):
            collectives.broadcast_tensors(buffers)

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        return _Paused(self) if self.world_size > 1 else None

    def explain_unused(self, names: Sequence[str]) -> DistributedError:
        """Return the error for parameters that a step didn't use, where the ranks wait for the gradients of all.

        Args:
            names: of the parameters without a gradient on this rank.
        """
        shown = ", ".join(map(repr, names[:_SHOWN])) + (" and others" if len(names) > _SHOWN else "")
        return DistributedError(
            f"the parameters {shown} were not used by training_step on rank {self.global_rank}, and the others wait "
            f"for their gradients: use strategy={type(self).__name__}(find_unused_parameters=True), or freeze them "
            "with requires_grad_(False)"
        )


class _Paused:
    """``no_backward_sync()``, which can be entered many times, inside of itself too."""

    def __init__(self, strategy: GradientAveragingStrategy) -> None:
        self.strategy = strategy
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(self.strategy.averaging_is_paused)
        self.strategy.averaging_is_paused = True

    def __exit__(self, *exc_info: Any) -> None:
        self.strategy.averaging_is_paused = self.before.pop()
