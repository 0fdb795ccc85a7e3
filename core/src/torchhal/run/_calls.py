"""Carry out a loop's calls of models, optimizers and schedulers through the strategy of its run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchhal._arguments import check_clip_algorithm, check_positive
from torchhal.errors import ConfigurationError, ModelError
from torchhal.precision.base import Precision, needs_closure
from torchhal.run._batches import TrainingBatches
from torchhal.run._models import FunctionSteps
from torchhal.run._routes import Route, Routes
from torchhal.run._run_trainer import RunTrainer
from torchhal.run._setup_objects import SetupObjects
from torchhal.strategies import StepResult, Strategy, overrides
from torchhal.trainer.loops import extract_loss
from torchhal.trainer.loops._batch_hooks import without_graph


def _plain_calls(strategy: Strategy) -> tuple[bool, bool]:
    """Return whether ``strategy.backward`` only calls ``loss.backward``, and its ``optimizer_step`` ``optimizer.step``.

    Then a loop calls these itself: between the computations of a step, each Python call takes microseconds.
    """
    precision = strategy.precision
    if strategy.mark_step is not None:
        return False, False
    backward = not any(overrides(strategy, Strategy, name) for name in ("backward", "manual_backward"))
    step = not overrides(strategy, Strategy, "optimizer_step") and strategy._precision_step is None
    return (
        backward and not overrides(precision, Precision, "backward"),
        step and not overrides(precision, Precision, "optimizer_step"),
    )


class _Closure:
    """A closure of the user's, with gradients on; ``value`` is what its first call has returned."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        self.value: Any = None

    def __call__(self) -> Any:
        with torch.enable_grad():
            found = self._closure()
        self.value = found if self.value is None else self.value  # an optimizer returns the first of several
        return found


class Calls:
    """The calls of one run, from its set-up to its end.

    A model's ``forward``, an optimizer's ``step`` and ``zero_grad`` and a scheduler's ``step`` are routed here, on the
    user's own objects.

    Args:
        trainer: whose run is set up.
        found: the user's objects.
        batches: which batch is in hand.
    """

    def __init__(self, trainer: RunTrainer, found: SetupObjects, batches: TrainingBatches) -> None:
        run = trainer._run
        self._strategy: Strategy = run.strategy
        self._progress = run.progress
        self._batches = batches
        self._module = run.module
        self._features = frozenset(self._strategy.features)
        self._alone = run.world_size == 1
        self._automatic = bool(getattr(run.module, "automatic_optimization", True))
        self._trains = bool(found.optimizers)
        self._refusal = self._strategy.call_refusal()
        self._scales = "scales_loss" in self._strategy.precision.features
        self._depth = 0
        """Number of models that are being called, one inside of another."""
        self._is_fresh = False
        """Whether a forward has run since the last backward: the one that averages what it computes."""
        self._backwards = 0
        self._seen: dict[int, int] = {}
        """The number of backward passes at the last step of each optimizer."""
        self._unclipped: float | None = run.gradient_clip_val or None
        """The run's, by which nothing clips before the loop asks for it; None where nothing is to be said about it."""
        if "owns_clipping" in self._features:
            self._unclipped = None
        self._warn_once = run.warn_once
        self._skipped: set[int] = set()
        """The optimizers whose last step the precision has skipped."""
        self._owns = {"owns_step", "owns_backward"} & self._features
        owned = {"owns_backward", "owns_accumulation"}
        self._keeps_function = "owns_step" in self._features or owned <= self._features
        self._function_code: Any = None
        plain = _plain_calls(self._strategy) if self._alone else (False, False)
        self._is_plain_backward, self._is_plain_step = plain
        self._steps = FunctionSteps(run.module)
        self._step_functions: dict[str, Callable[..., Any]] = {}
        self._routes = Routes()
        self._models = [run.module if not name else run.module.get_submodule(name) for name in found.models]
        self._has_one_optimizer = len(found.optimizers) == 1
        try:
            self._add_routes(found)
        except BaseException:
            self.remove()
            raise

    def _add_routes(self, found: SetupObjects) -> None:
        for now in self._models:
            if not self._is_plain_forward(now.forward):
                self._routes.add(now, "forward", partial(self._forward, now))
        for optimizer in found.optimizers:
            self._routes.add(optimizer, "step", partial(self._step, optimizer))
            self._routes.add(optimizer, "zero_grad", partial(self._zero_grad, optimizer))
        for scheduler in found.schedulers:
            self._routes.add(scheduler, "step", partial(self._scheduler_step, scheduler))
            self._routes.add(scheduler, "state_dict", self._scheduler_state)

    def remove(self) -> None:
        """Give the user's objects their own methods back."""
        self._routes.remove()

    def may_train(self) -> bool:
        """Return whether a model with trainable parameters is in training mode, and gradients are on."""
        return (
            self._trains
            and torch.is_grad_enabled()
            and any(
                model.training and any(parameter.requires_grad for parameter in model.parameters())
                for model in self._models
            )
        )

    # -- forward ---------------------------------------------------------------------------------------------------

    def _is_plain_forward(self, forward: Callable[..., Any]) -> bool:
        """Return whether a call of the model needs nothing around it: a small step's time is that of such calls."""
        functions = (self._strategy.forward_function(forward, training=training) for training in (True, False))
        return self._alone and not self._refusal and all(function == forward for function in functions)

    def _forward(self, model: Any, route: Route) -> Callable[..., Any]:
        train = self._strategy.forward_function(route.inner, training=True)
        evaluate = self._strategy.forward_function(route.inner, training=False)
        inner, parameters = route.inner, list(model.parameters())

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a model that another one calls is a part of that
                return inner(*args, **kwargs)
            self._depth += 1
            try:
                if not self._trains or self._batches.in_evaluation or not torch.is_grad_enabled():
                    return evaluate(*args, **kwargs)
                if not any(parameter.requires_grad for parameter in parameters):  # a teacher
                    return evaluate(*args, **kwargs)
                if self._refusal:
                    raise ConfigurationError(self._refusal)
                if self._batches.evaluation is not None:
                    self._batches.end_evaluation()
                self._is_fresh = True
                return train(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def function(self, function: Callable[[Any], Any], batch: Any, *, backward: bool) -> Any:
        """Return ``function(batch)``, run as a step of the module: in training one that a backward may follow.

        Args:
            function: calls the model, and returns a loss, a dict with one, or in an evaluation anything.
            batch: its argument.
            backward: run that backward, too, or let the strategy do it.
        """
        name = "forward_backward" if backward else "forward"
        if not callable(function):
            raise ModelError(f"{name} takes a function of the batch (got {function!r}): {name}(function, batch)")
        if backward and self._depth:
            raise ConfigurationError("forward_backward inside of a forward, or of another one: call it from the loop")
        training = self._trains and not self._batches.in_evaluation and torch.is_grad_enabled()
        if backward and not training:
            raise ConfigurationError(
                "forward_backward trains: call it with gradients, outside of evaluation_batches, and after a setup "
                "with an optimizer"
            )
        owns = self._owns
        if training and owns and not backward:
            raise ConfigurationError(self._refusal)
        name = "training_step" if training else "validation_step"
        if training and self._keeps_function:
            self._check_same(function)
        if training and self._batches.evaluation is not None:
            self._batches.end_evaluation()
        if training and "owns_backward" in owns and not self._progress.has_gradients:
            for optimizer in self._strategy.optimizers:
                optimizer.zero_grad()
        self._depth += 1
        try:
            with self._routes.without_models(), self._steps.running(function):
                if name not in self._step_functions:
                    self._step_functions[name] = self._strategy.step_function(name)
                output = self._step_functions[name](batch, 0)
        finally:
            self._depth -= 1
        if not backward:
            self._is_fresh |= training
            return output
        if owns:
            self._backwards += 1
            self._progress.has_gradients = True
            return without_graph(output)
        loss = extract_loss(output, "", "the function of forward_backward")
        if loss is None:
            raise ModelError("the function of forward_backward must return a loss, or a dict with 'loss' (got None)")
        self._is_fresh = True
        self.backward(loss)
        return without_graph(output)

    def _check_same(self, function: Callable[[Any], Any]) -> None:
        """Raise for another function than the first one, which an engine that owns whole steps may have compiled."""
        code = getattr(function, "__code__", function)
        self._function_code = code if self._function_code is None else self._function_code
        if code is not self._function_code:
            raise ConfigurationError(
                f"strategy {self._strategy.display_name!r} keeps the function of the first forward_backward, and this "
                "is another: call it with one, which looks at the batch for what it is to do"
            )

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a loss, with the gradients averaged over the ranks if the batch ends an accumulation."""
        if not isinstance(loss, torch.Tensor):
            raise ModelError(f"backward takes the loss, a tensor of one element (got {type(loss).__name__})")
        if loss.numel() != 1 or loss.grad_fn is None:
            raise ModelError(
                f"backward takes a loss of one element that depends on a trainable parameter (got shape "
                f"{tuple(loss.shape)}, {'without' if loss.grad_fn is None else 'with'} a graph)"
            )
        if not self._trains:
            raise ConfigurationError("setup got no optimizer, so the model is set up for inference: give it one")
        if self._owns:
            raise ConfigurationError(self._refusal)
        if (every := self._batches.accumulate) > 1:
            if not self._batches.in_batch:
                raise ConfigurationError(
                    f"accumulate_grad_batches={every} counts batches of run.batches(loader): put the steps of a batch "
                    "that comes from elsewhere into 'with run.accumulate():'"
                )
            loss = loss / every
        strategy = self._strategy
        if self._is_plain_backward:
            loss.backward(*args, **kwargs)
        elif not self._automatic:
            strategy.manual_backward(loss, *args, **kwargs)
        else:
            strategy.backward(loss, *args, **kwargs)
            if not self._is_fresh and not self._alone and self._batches.ends_accumulation:
                strategy.sync_gradients()  # a second backward, which no wrapper waits for
        self._is_fresh = False
        self._backwards += 1
        self._progress.has_gradients = True

    def clip_gradients(self, optimizer: Any, max_norm: float, algorithm: str) -> torch.Tensor | None:
        """Clip where the batch ends an accumulation; see :meth:`.Strategy.clip_gradients`."""
        if not hasattr(optimizer, "param_groups"):
            raise ModelError(
                "clip_gradients takes the optimizer whose parameters' gradients it clips, and not "
                f"{type(optimizer).__name__}: clip_gradients(optimizer, max_norm)"
            )
        max_norm = check_positive("max_norm", max_norm)
        algorithm = check_clip_algorithm("algorithm", algorithm)
        self._unclipped = None
        if self._batches.in_batch and not self._batches.ends_accumulation:
            return None
        if "owns_clipping" in self._features:
            strategy = self._strategy
            if (strategy.gradient_clip_val, strategy.gradient_clip_algorithm) == (max_norm, algorithm):
                return None  # in its step
            raise ConfigurationError(
                f"strategy {self._strategy.display_name!r} clips by itself: give torchhal.Run(gradient_clip_val="
                f"{max_norm}), which it was set up with"
            )
        return self._strategy.clip_gradients(optimizer, max_norm, algorithm)

    # -- optimizers ------------------------------------------------------------------------------------------------

    def _zero_grad(self, optimizer: Any, route: Route) -> Callable[..., Any]:
        owned = {"owns_accumulation", "owns_step"} & self._features
        own = self._strategy.zero_grad if overrides(self._strategy, Strategy, "zero_grad") else None

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if owned or (self._batches.accumulate > 1 and self._progress.has_gradients):
                return  # in the midst of an accumulation
            if own is not None:
                own(optimizer)
            else:
                route.inner(*args, **kwargs)

        return zero_grad

    def _step(self, optimizer: Any, route: Route) -> Callable[..., Any]:
        takes_closure = needs_closure(optimizer) or "owns_closure" in self._features
        plain = self._is_plain_step and not self._scales

        def step(closure: Callable[[], Any] | None = None) -> Any:
            batches = self._batches
            evaluate = None if closure is None else _Closure(closure)
            if evaluate is not None and (not takes_closure or not batches.ends_accumulation):
                evaluate()
            if batches.in_batch and not batches.ends_accumulation:
                return None if evaluate is None else evaluate.value
            if "owns_step" in self._features:
                result = StepResult.UPDATED
            elif evaluate is not None and takes_closure:
                result = StepResult.of(self._strategy.optimizer_step(optimizer, evaluate))
            elif plain:
                route.inner()
                result = StepResult.UPDATED
            else:
                self._check_backward(optimizer)
                result = StepResult.of(self._strategy.optimizer_step(optimizer))
            if self._unclipped is not None:
                self._tell_unclipped()
            self._seen[id(optimizer)] = self._backwards
            self._progress.has_gradients = False
            self._progress.count_step(result)
            if not result.updated:
                self._skipped.add(id(optimizer))
            elif self._skipped:
                self._skipped.discard(id(optimizer))
            if self._has_one_optimizer:  # else a stop could come between the steps of one batch
                batches.boundary()
            return None if evaluate is None else evaluate.value

        return step

    def _tell_unclipped(self) -> None:
        self._warn_once(
            f"gradient_clip_val={self._unclipped} clips nothing under strategy {self._strategy.display_name!r}, where "
            f"the loop clips: call run.clip_gradients(optimizer, {self._unclipped}) before the step"
        )
        self._unclipped = None

    def _check_backward(self, optimizer: Any) -> None:
        """Raise if the gradients came by ``loss.backward()``: the ranks would part, or a scaled loss be unscaled."""
        if (self._alone and not self._scales) or self._seen.get(id(optimizer), 0) != self._backwards:
            return
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            raise ModelError(
                f"the {type(optimizer).__name__} steps with gradients of no run.backward(loss) since its last step, "
                "which neither averages them over the ranks nor scales the loss: call run.backward(loss) instead of "
                "loss.backward()"
            )

    def _scheduler_step(self, scheduler: Any, route: Route) -> Callable[..., Any]:
        reduces = isinstance(scheduler, ReduceLROnPlateau) and not self._alone

        def step(*args: Any, **kwargs: Any) -> Any:
            batches = self._batches
            if "owns_schedulers" in self._features or (batches.in_batch and not batches.ends_accumulation):
                return None
            if batches.in_batch and id(scheduler.optimizer) in self._skipped:
                return None
            if reduces:  # or the ranks would go on with different learning rates
                if args:
                    args = (self._strategy.reduce(float(args[0]), "mean"), *args[1:])
                elif "metrics" in kwargs:
                    kwargs["metrics"] = self._strategy.reduce(float(kwargs["metrics"]), "mean")
            return route.inner(*args, **kwargs)

        return step

    def _scheduler_state(self, route: Route) -> Callable[..., Any]:
        """Return the scheduler's ``state_dict``, which takes all its attributes, without the routes among them."""
        return lambda: {name: value for name, value in route.inner().items() if not isinstance(value, Route)}
