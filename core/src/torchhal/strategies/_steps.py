"""Run the steps of the loops: forward, backward, gradient clipping and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal._overrides import overrides
from torchhal.precision import Precision
from torchhal.precision.base import dense_gradient
from torchhal.strategies._communication import StrategyCommunication
from torchhal.strategies._forward_through import forward_through
from torchhal.strategies._step_result import StepResult

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Names of the step methods of a module."""


def around_call(
    function: Callable[..., Any], wrap: Callable[[Callable[[Any], Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return ``function`` inside what ``wrap`` puts around a step, whose batch is ``(args, kwargs)`` of the call.

    Args:
        function: takes any arguments.
        wrap: takes a step of one argument, and returns it with more around it, or unchanged.

    .. versionadded:: 0.2
    """

    def packed(given: Any) -> Any:
        return function(*given[0], **given[1])

    step = wrap(packed)
    return function if step is packed else lambda *args, **kwargs: step((args, kwargs))


class StrategySteps(StrategyCommunication):
    """The steps of the loops: forward, backward, gradient clipping and the optimizer step."""

    def step_function(self, name: str) -> Callable[..., Any]:
        """Return the function that runs one of :data:`STEPS` with everything decided: wrapper, precision, overrides.

        Called once per loop on every rank. A subclass that defines a method of that name (``training_step(self,
        *args)``) has it called instead.

        Args:
            name: one of :data:`STEPS`.

        Returns:
            A function that takes the arguments of the module's own step and returns its output, for every batch. Where
            the step raises, nothing of the precision's context stays entered, and the next call is as ever.

        Checks: STR-36, STR-69, STR-80.
        """
        own = getattr(self, name, None)
        if own is not None:
            return own  # type: ignore[no-any-return]
        return self.marked(name, self.with_precision(self.module_step(name)))

    def marked(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` with the step marks it needs beside those of backward and optimizer_step.

        Args:
            name: one of :data:`STEPS`.
            step: the function that runs it.
        """
        mark = self.mark_step
        automatic = getattr(self.module, "automatic_optimization", True) and bool(self.optimizers)
        if mark is None or (name == "training_step" and automatic):  # marked where its work is complete
            return step

        def and_mark(*args: Any) -> Any:
            output = step(*args)
            mark()
            return output

        return and_mark

    def module_step(self, name: str) -> Callable[..., Any]:
        """Return the module's step method, through ``self.model`` where that wraps the module.

        Args:
            name: one of :data:`STEPS`.
        """
        step: Callable[..., Any] = getattr(self.module, name)
        automatic = getattr(self.module, "automatic_optimization", True)
        if name != "training_step" or not self.model_is_connected or not automatic:
            return step
        return forward_through(self, self.module, step)

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        """Return ``forward`` as a loop of the user's own may call it at any place, with what a step has around it.

        :class:`torchhal.Run` calls models through it, once per set-up and mode; afterwards come :meth:`backward` and
        :meth:`optimizer_step`. A class that overrides :meth:`module_step` or :meth:`step_function` overrides this
        method too, or its models are trained by ``run.forward_backward`` alone.

        Args:
            forward: the forward of :attr:`module`, or of a part of it.
            training: whether a backward may follow.

        Checks: STR-101.

        .. versionadded:: 0.2
        """
        if not training or not self.model_is_connected or not getattr(self.module, "automatic_optimization", True):
            return forward
        return around_call(forward, lambda call: forward_through(self, self.module, call))

    def call_refusal(self) -> str:
        """Return why no loop of the user's own can call models in training, or "" where it can, by :meth:`module_call`.

        .. versionadded:: 0.2
        """
        name = repr(self.alias or type(self).__name__)
        instead = "train by run.forward_backward(function, batch), where function(batch) returns the loss"
        features: frozenset[str] = getattr(self, "features", frozenset())
        if "owns_step" in features:
            return f"strategy {name} runs forward, backward and the optimizer step as one: {instead}"
        if "owns_backward" in features:
            return f"strategy {name} runs forward and backward as one: {instead}"
        for owner in type(self).__mro__:
            if "module_call" in vars(owner):
                return ""
            if any(method in vars(owner) for method in ("module_step", "step_function", *STEPS)):
                return (
                    f"strategy {name} has steps of its own ({owner.__name__}), and no module_call, by which a loop "
                    f"would call a model alone: {instead}"
                )
        return ""

    def forward_function(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        """Return :meth:`module_call` of ``forward`` under the precision: inputs converted, context entered, and so on.

        Args:
            forward: takes any arguments.
            training: whether a backward may follow.

        .. versionadded:: 0.2
        """
        return around_call(self.module_call(forward, training=training), self.with_precision)

    def with_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` under the precision: input converted, forward context entered, output converted.

        Args:
            function: called as ``function(batch, *rest)``.
        """
        precision = self.precision
        forward_context = precision.forward_context if overrides(precision, Precision, "forward_context") else None
        convert_input = precision.convert_input if overrides(precision, Precision, "convert_input") else None
        convert_output = precision.convert_output if overrides(precision, Precision, "convert_output") else None
        if convert_input is None and forward_context is None and convert_output is None:
            return function

        def step(batch: Any, *rest: Any) -> Any:
            if convert_input is not None:
                batch = convert_input(batch)
            if forward_context is None:
                output = function(batch, *rest)
            else:
                with forward_context():
                    output = function(batch, *rest)
            return output if convert_output is None else convert_output(output)

        return step

    def evaluation_step_of(self, ranks: Collection[int]) -> AbstractContextManager[Any]:
        """Return a context for one step of an evaluation for which only some ranks have a batch.

        Those ranks run the step inside. The others enter it with nothing inside and take part there in the
        communication of the step. Called on every rank if :attr:`evaluation_communicates`, and never otherwise.

        Args:
            ranks: the global ranks that have a batch.
        """
        return nullcontext()

    def check_accumulation(self, batches: int) -> None:
        """Raise an error where an optimizer step can't take so many batches.

        Called on every rank before the Trainer takes another number than ``accumulate_grad_batches`` to keep the global
        batch of a run on fewer or more processes.

        Args:
            batches: number of training batches per optimizer step.

        Raises:
            ConfigurationError: it can't.
        """

    def process_dataloader(self, loader: Any, *, training: bool) -> Any:
        """Return the loader that the loops iterate; the same loader by default.

        Called on every rank for each loader, e.g. to share it out in another way. What belongs to the hardware rather
        than to the strategy goes into :meth:`.Accelerator.process_dataloader`, which is called with the result.

        Args:
            loader: the user's loader.
            training: True for a loader of training batches.
        """
        return loader

    def batch_to_device(self, batch: Any) -> Any:
        """Return ``batch`` on this process's device, copied from pinned memory without waiting for it.

        Args:
            batch: tensors at any depth of containers.
        """
        return self.accelerator.batch_to_device(batch, self.root_device, non_blocking=True)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients before the first backward of a step.

        Not called under ``owns_accumulation``.

        Args:
            optimizer: the one whose gradients are cleared.

        Checks: STR-75.
        """
        optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradients of ``loss``, averaged over the ranks unless under :meth:`no_backward_sync`.

        Called on every rank.

        Args:
            loss: a 0-d tensor with a graph.
            *args: passed on to ``loss.backward``.
            **kwargs: passed on to ``loss.backward``; but ``through``, a function that is called in its place.

        Checks: STR-14, STR-15, STR-17, STR-18, STR-20, STR-64, STR-66, STR-69, STR-72, STR-74, STR-96.
        """
        self.precision.backward(loss, *args, **kwargs)
        if self.mark_step is not None:
            self.mark_step()

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Call :meth:`backward` for a module that steps its optimizers itself.

        Args:
            loss: a 0-d tensor with a graph.
            *args: passed on to :meth:`backward`.
            **kwargs: passed on to :meth:`backward`.

        Checks: STR-19, STR-74.
        """
        self.backward(loss, *args, **kwargs)

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        """Return a context in which forward and backward send no gradients, or None where none are sent.

        Called once before the loop, on every rank; the context is entered for all but the last micro-batch of each
        step, so it can be entered any number of times. The last one's backward averages what was accumulated.

        Checks: STR-15.
        """
        return None

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, once per step; called before hooks that read them.

        Args:
            optimizer: the one whose parameters' gradients are changed in place.
        """
        self.precision.unscale_gradients(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Clip the gradients by their global norm, over all shards, or by value.

        Called on every rank; see :meth:`Precision.clip_gradients`.

        Args:
            optimizer: the one whose parameters' gradients are clipped in place.
            clip_val: the greatest 2-norm (``"norm"``) or absolute value (``"value"``).
            algorithm: ``"norm"`` or ``"value"``.

        Returns:
            The norm before clipping, 0-d, for ``"norm"``; None for ``"value"``.

        Checks: STR-35.
        """
        self.unscale_gradients(optimizer)
        return self.precision.clip_gradients(optimizer, clip_val, algorithm)

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        """Return the 2-norm over all gradients of ``optimizer``, on any rank.

        Gradients of a scaled loss are unscaled first, where they aren't; nothing else is changed.

        For hooks between the last backward and the step, on every rank. Where ranks have different parameters, or
        shards of them, as in a pipeline, ``torch.nn.utils.get_total_norm`` computes the norm of this rank's alone.

        Args:
            optimizer: the one whose parameters' gradients are measured.

        Returns:
            A 0-d tensor: the norm of the unscaled gradients.

        Checks: STR-70, STR-95.
        """
        self.unscale_gradients(optimizer)
        parameters = [parameter for parameter in self.precision.main_params(optimizer) if parameter.grad is not None]
        return nn.utils.get_total_norm([dense_gradient(parameter) for parameter in parameters])

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Update the parameters with ``optimizer``.

        Called on every rank.

        Args:
            optimizer: the optimizer to step.
            closure: runs inside the step, with gradients on and all parameters in ``optimizer``: forward, backward and
                clipping included.

        Returns:
            The number of steps to count, and whether parameters changed; an override may also return a bool, as
            :meth:`.StepResult.of` takes it.

        Checks: STR-16, STR-52, STR-69, STR-79.
        """
        stepped = (self._precision_step or self.precision.optimizer_step)(optimizer, closure)
        if self.mark_step is not None:
            self.mark_step()
        return StepResult.of(stepped)
