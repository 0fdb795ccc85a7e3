"""Wrap the user's module for Bagua for one run, pause the wrapper, and undo it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError


def ignored_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of ``module`` that Bagua was told to leave alone."""
    lists = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")
    return [name.lstrip(".") for listed in lists for name in getattr(module, listed, ())]


class Runner(nn.Module):
    """The module that Bagua wraps, whose forward is one step of the user's.

    Bagua hooks a module's forward, and a step of the user's may call the user's module several times.

    It also gives every parameter a name behind a point: Bagua knows one at the top of a module under two names, and
    would wait for it for ever.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.step: Callable[..., Any] | None = None
        """What runs as forward: the module unless it is a step."""
        self._bagua_module_name: Any = f"torchhal_{id(module)}"  # a parameter must keep the name it once had
        self._bagua_params_and_buffers_to_ignore: Any = [f"module.{name}" for name in ignored_names(module)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.step or self.module)(*args, **kwargs)


class DDPWrapper:
    """The user's module in Bagua's wrapper.

    Args:
        module: on its device, with something to train.
        optimizers: over its parameters. Their ``step`` is Bagua's until :meth:`undo`.
        name: of the algorithm.
        options: of the algorithm.
        flatten: see ``BaguaStrategy``.
        batches: how many have been trained on before.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        name: str,
        options: Mapping[str, Any],
        flatten: bool,
        batches: int = 0,
    ) -> None:
        from bagua.torch_api.algorithms import Algorithm
        from bagua.torch_api.data_parallel import DistributedDataParallel

        given = dict(options)
        if name == "qadam":
            given["q_adam_optimizer"] = optimizers[0]
        self.optimizers = list(optimizers)
        self.runner = Runner(module)
        ignored = set(self.runner._bagua_params_and_buffers_to_ignore)
        self.parameters = [
            parameter
            for name, parameter in self.runner.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        self.open = False
        """Whether a forward has run whose backward has not."""
        wrapper = DistributedDataParallel(
            self.runner,
            gradient_as_bucket_view=flatten,
            optimizers=self.optimizers,
            algorithm=Algorithm.init(name, **given),
        )
        for optimizer in self.optimizers:  # a scheduler warns where it doesn't find its own wrapper outside
            if hasattr(vars(optimizer)["_bagua_original_step"], "_wrapped_by_lr_sched"):
                optimizer.step.__func__._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.wrapper: Any = wrapper
        wrapper.inner.bagua_train_step_counter = batches
        self._is_async = name == "async"
        self._paused = False
        if self._is_async:
            wrapper.register_forward_pre_hook(self._resume)

    @property
    def sends(self) -> bool:
        """True while a backward communicates."""
        wrapper = self.wrapper
        return bool(wrapper.inner.require_backward_grad_sync)

    @property
    def batches(self) -> int:
        wrapper = self.wrapper
        return int(wrapper.inner.bagua_train_step_counter)

    def no_sync(self) -> AbstractContextManager[Any]:
        wrapper = self.wrapper
        context: AbstractContextManager[Any] = wrapper.no_sync()
        return context

    def call(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run ``step(*args)`` as Bagua's forward."""
        self.runner.step = step
        self.open = True
        try:
            output = self.wrapper(*args)
        except BaseException:
            self.close_forward()
            raise
        finally:
            self.runner.step = None
        if output is None:  # a batch that is left out: no backward will follow
            self.open = False
            self._after_backward()
        return output

    def close_forward(self) -> None:
        """Undo what a forward has begun without a backward to end it: asynchronous training has locked the weights."""
        if self.open and self._is_async:
            self._after_backward()
        self.open = False

    def _after_backward(self) -> None:
        wrapper = self.wrapper
        algorithm = wrapper.bagua_algorithm
        algorithm.init_post_backward_hook(wrapper.inner)()

    def pause(self) -> None:
        """Stop averages in the background until the next step; every rank must call."""
        if self._is_async and not self._paused:
            wrapper = self.wrapper
            algorithm = wrapper.bagua_algorithm
            algorithm.abort(wrapper)
            # resuming what has never begun would keep it from beginning
            self._paused = algorithm.status.name == "STOPPED"

    def abandon(self, seconds: float) -> None:
        """Do as :meth:`pause` where other ranks may be gone or late: after ``seconds`` this rank stops alone.

        What waits for the others then must not keep this process, which they wait for to end.
        """
        self.close_forward()
        if not self._is_async or self._paused:
            return
        ending = threading.Thread(target=self._pause_quietly, name="torchhal-bagua", daemon=True)
        ending.start()
        ending.join(seconds)
        if vars(self)["_paused"]:  # by that thread
            return
        wrapper = self.wrapper
        algorithm = wrapper.bagua_algorithm
        wrapper.inner.bagua_buckets = [None]  # without an operation there, the thread ends
        with algorithm.cv:  # where it may still wait to begin
            algorithm.notified = True
            algorithm.cv.notify()

    def _pause_quietly(self) -> None:
        with suppress(Exception):  # the run has an error of its own
            self.pause()

    def _resume(self, *unused: Any) -> None:
        if self._paused:
            wrapper = self.wrapper
            algorithm = wrapper.bagua_algorithm
            algorithm.resume(wrapper)
            self._paused = False

    def undo(self) -> None:
        """Take Bagua's hooks from the parameters and the optimizers, and give each parameter memory of its own."""
        wrapper = self.wrapper
        inner = wrapper.inner
        inner._reset_algorithm_state()
        for optimizer in self.optimizers:
            original = vars(optimizer).pop("_bagua_original_step", None)
            if original is None:
                continue
            if getattr(original, "__func__", None) is type(optimizer).step:
                del optimizer.step
            else:  # a scheduler's, around the optimizer's own
                optimizer.step = original  # type: ignore[method-assign]
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()


def check_qadam(optimizers: Sequence[Optimizer], trained: Sequence[nn.Parameter], *, algorithm: str) -> None:
    """Check that ``QAdamOptimizer`` and algorithm ``qadam`` are used together.

    Raises:
        ConfigurationError: algorithm ``qadam`` without its optimizer, or that with another algorithm.
    """
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    fits = [isinstance(optimizer, QAdamOptimizer) for optimizer in optimizers]
    if algorithm != "qadam":
        if any(fits):
            raise ConfigurationError(
                f"QAdamOptimizer works with algorithm 'qadam' only, which averages its momentum (got {algorithm!r}): "
                "use torch.optim.Adam, or strategy=BaguaStrategy(algorithm='qadam')"
            )
        return
    if fits != [True]:
        raise ConfigurationError(
            "algorithm 'qadam' needs one optimizer, of its own kind: return "
            f"bagua.torch_api.algorithms.q_adam.QAdamOptimizer from configure_optimizers (got {kinds})"
        )
    stepped = {id(parameter) for group in optimizers[0].param_groups for parameter in group["params"]}
    if stepped != {id(parameter) for parameter in trained}:
        raise ConfigurationError(
            "algorithm 'qadam' averages the momentum of every parameter that is trained, and QAdamOptimizer was given "
            "others: give it those of the module with requires_grad, and freeze the rest"
        )


class TouchAllParameters(torch.autograd.Function):
    """The loss as a function of every parameter: those that it does not depend on get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(parameter.new_zeros(()).expand(parameter.shape) for parameter in ctx.parameters)
