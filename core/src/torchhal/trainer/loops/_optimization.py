"""Optimizers and schedulers as users return them, and the one function that turns a batch into a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchhal._overrides import overrides
from torchhal.errors import ConfigurationError, ModelError, NonFiniteLossError
from torchhal.precision import Precision
from torchhal.precision.base import needs_closure
from torchhal.strategies import Strategy
from torchhal.trainer._call_signatures import adapt_step
from torchhal.trainer._hooks import module_hook
from torchhal.trainer._run_part import RunPart
from torchhal.trainer._settings import refuse_by_hand
from torchhal.trainer.run import Run

FORMS = (
    "an optimizer, a list of them, (optimizers, schedulers), {'optimizer': ..., 'lr_scheduler': ...}, a tuple of "
    "such dicts, or None"
)

_FREED_GRAPH = "backward through the graph a second time"
"""Of the error of torch's autograd engine, which has no class of its own."""

_TOO_MANY = 100
"""Batches without a loss from the beginning of a fit, after which it is said."""


@dataclass
class SchedulerConfig:
    """One scheduler and when it steps."""

    scheduler: Any
    interval: str = "epoch"
    """"epoch" or "step" (an optimizer step)."""
    frequency: int = 1
    monitor: str | None = None
    """The metric handed to ``step``; needed by ReduceLROnPlateau."""
    strict: bool = True
    """Whether a missing metric is an error or a skipped step."""
    name: str | None = None
    reduce_on_plateau: bool = False


def configure_optimizers(module: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """What ``module.configure_optimizers()`` returned, in one form; ModelError for anything else."""
    return parse_optimizers(module.configure_optimizers(), type(module).__name__, module)


def parse_optimizers(value: Any, model: str, module: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers: list[Any]
    schedulers: list[Any] = []
    if value is None:
        return [], []
    if isinstance(value, Mapping):
        optimizers, schedulers = _from_dict(value, model)
    elif isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
        optimizers = []
        for item in value:
            own, its = _from_dict(item, model)
            optimizers += own
            schedulers += its
    elif isinstance(value, Sequence) and len(value) == 2 and isinstance(value[0], Sequence):
        optimizers = list(value[0])
        schedulers = list(value[1]) if isinstance(value[1], Sequence) else [value[1]]
    elif isinstance(value, Sequence):
        optimizers = list(value)
    else:
        optimizers = [value]
    for optimizer in optimizers:
        if not _is_optimizer(optimizer):
            # torch prints an optimizer on a line for each of its settings
            given = ", ".join(type(item).__name__ if hasattr(item, "step") else repr(item) for item in optimizers)
            meant = ": write [optimizer], [scheduler]" if any(map(_is_optimizer, optimizers)) else ""
            raise ModelError(f"{model}.configure_optimizers must return {FORMS} (got {given}){meant}")
    _check_parameters(optimizers, module, model)
    return optimizers, [_scheduler_config(item, model, schedulers) for item in schedulers]


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer) or (hasattr(value, "step") and hasattr(value, "param_groups"))


def _from_dict(value: Mapping[str, Any], model: str) -> tuple[list[Any], list[Any]]:
    if unknown := sorted(set(value) - {"optimizer", "lr_scheduler", "monitor"}):
        raise ModelError(
            f"{model}.configure_optimizers returned a dict with the keys {', '.join(map(repr, unknown))}; it may hold "
            "'optimizer', 'lr_scheduler' and 'monitor'"
        )
    if "optimizer" not in value:
        raise ModelError(f"{model}.configure_optimizers returned a dict without 'optimizer' (got {dict(value)!r})")
    scheduler = value.get("lr_scheduler")
    if scheduler is None:
        return [value["optimizer"]], []
    if value.get("monitor") is not None and not isinstance(scheduler, SchedulerConfig):
        own = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
        scheduler = {"monitor": value["monitor"], **own}
    return [value["optimizer"]], [scheduler]


def _scheduler_config(item: Any, model: str, schedulers: Sequence[Any]) -> SchedulerConfig:
    if isinstance(item, SchedulerConfig):
        return item
    fields = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    known = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
    if unknown := sorted(set(fields) - known):
        raise ModelError(
            f"an lr_scheduler of {model} may hold {', '.join(sorted(known))} (got {', '.join(map(repr, unknown))} too)"
        )
    scheduler = fields.get("scheduler")
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise ModelError(f"an lr_scheduler of {model} must be an object with a method step (got {scheduler!r})")
    config = SchedulerConfig(**fields)
    if isinstance(config.scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
        if config.monitor is None:
            raise ModelError(
                f"the ReduceLROnPlateau of {model} needs the name of a logged metric: return "
                "{'optimizer': ..., 'lr_scheduler': ..., 'monitor': 'val_loss'}"
            )
    if config.interval not in ("epoch", "step"):
        raise ModelError(f"'interval' of an lr_scheduler must be 'epoch' or 'step' (got {config.interval!r})")
    if isinstance(config.frequency, bool) or not isinstance(config.frequency, int) or config.frequency < 1:
        raise ModelError(f"'frequency' of an lr_scheduler must be an int of at least 1 (got {config.frequency!r})")
    return config


def _check_parameters(optimizers: Sequence[Any], module: Any, model: str) -> None:
    """An optimizer over tensors that aren't this model's trains nothing: another model's, a copy's."""
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in own for parameter in given)
        if given and foreign == len(given):
            raise ModelError(
                f"the {type(optimizer).__name__} of {model} holds {foreign} parameter(s), none of which belong to the "
                "model: build it from self.parameters() inside configure_optimizers"
            )


class WrappedOptimizer:
    """An optimizer as user code sees it: ``step`` goes through precision, strategy, hooks and counters.

    It is good for one fit; the Trainer has others for the next one.
    """

    def __init__(self, optimizer: Optimizer, optimization: Optimization) -> None:
        self.optimizer = optimizer
        self._optimization = weakref.ref(optimization)  # which holds this in turn

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run ``closure`` and update the parameters; the closure's value."""
        optimization = self._optimization()
        if optimization is None:
            raise ReferenceError(
                f"this {type(self.optimizer).__name__} belongs to a fit that is over: call self.optimizers() again"
            )
        return optimization.user_step(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return f"WrappedOptimizer({self.optimizer!r})"


def extract_loss(output: Any, model: str) -> torch.Tensor | None:
    """The loss in what ``training_step`` returned."""
    loss = output
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise ModelError(
                f"{model}.training_step must return a tensor, a dict with 'loss', or None (got a dict with "
                f"{', '.join(map(repr, output)) or 'nothing'})"
            )
        loss = output["loss"]
    if loss is None:
        return None
    if not isinstance(loss, torch.Tensor):
        raise ModelError(f"{model}.training_step must return a tensor, a dict with 'loss', or None (got {output!r})")
    if loss.numel() != 1:
        raise ModelError(
            f"{model}.training_step must return one number to minimise (got a tensor of shape {tuple(loss.shape)}): "
            "take its mean"
        )
    if loss.grad_fn is None and not loss.requires_grad:
        raise ModelError(
            f"the loss that {model}.training_step returned depends on no trainable parameter: nothing requires grad"
        )
    return loss


class Optimization(RunPart[Run]):
    """One training step, decided once: which hooks run, who clips, whether gradients accumulate.

    :meth:`step` is called for every batch. ``update`` says whether this batch ends an accumulation.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        module, strategy = run.module, run.strategy
        self.progress = run.progress
        self.module = module
        self.strategy = strategy
        self.model_name = type(module).__name__
        self.optimizers = strategy.optimizers
        self.automatic = bool(getattr(module, "automatic_optimization", True))
        self.accumulate = 1 if "owns_accumulation" in strategy.features else run.progress.accumulate
        self.wrap_optimizers()
        self._check()
        self.run_step = adapt_step(strategy.step_function("training_step"), module.training_step, several_loaders=False)
        self.owns_step = "owns_step" in strategy.features
        self.owns_backward = "owns_backward" in strategy.features
        self.owns_accumulation = "owns_accumulation" in strategy.features
        self.alone = run.world_size == 1
        self.check_finite = run.detect_anomaly
        self.no_sync = strategy.no_backward_sync() if self.accumulate > 1 else None
        self.averages = True
        """Whether the ranks average gradients in the backward of this batch."""
        self._bind_hooks()
        self._stepping = False
        """Whether an automatic step hands an optimizer its closure."""
        self.skipped = False
        """Whether the latest ``training_step`` gave no loss."""
        self._began_at = run.progress.total_batches
        self._without_loss = 0
        self._epochs_without_loss = 0

    def wrap_optimizers(self) -> None:
        """Follow the strategy's list of optimizers, which a callback may change while training."""
        self.wrapped = [WrappedOptimizer(optimizer, self) for optimizer in self.optimizers]
        self.closures = {id(optimizer): needs_closure(optimizer) for optimizer in self.optimizers}

    def _check(self) -> None:
        run = self.run
        if self.automatic:
            if len(self.optimizers) > 1:
                raise ModelError(
                    f"{self.model_name} has {len(self.optimizers)} optimizers: which loss belongs to which is yours to "
                    "say; set self.automatic_optimization = False and step them in training_step"
                )
            if self.accumulate > 1 and any(map(needs_closure, self.optimizers)):
                raise ConfigurationError(
                    f"'accumulate_grad_batches' must be 1 for {type(self.optimizers[0]).__name__}, which evaluates a "
                    f"batch several times within one step (got {self.accumulate})"
                )
            return
        refuse_by_hand(self.module, "gradient_clip_val", run.gradient_clip_val, None)
        refuse_by_hand(self.module, "gradient_clip_algorithm", run.gradient_clip_algorithm, "norm")
        refuse_by_hand(self.module, "accumulate_grad_batches", run.accumulate_grad_batches, 1)

    def accumulate_over(self, batches: int) -> None:
        """Take so many batches to a step, from the beginning of one."""
        self.accumulate = batches
        self.averages = True
        self.no_sync = self.strategy.no_backward_sync() if batches > 1 else None

    def _bind_hooks(self) -> None:
        run, module, strategy = self.run, self.module, self.strategy
        hooks = run.hooks
        self.before_backward = hooks.has("on_before_backward")
        self.after_backward = hooks.has("on_after_backward")
        self.before_step = hooks.has("on_before_optimizer_step")
        self.before_zero_grad = hooks.has("on_before_zero_grad")
        self.module_backward = module_hook(module, "backward")
        if self.owns_backward and (self.module_backward is not None or self.before_backward):
            name = "on_before_backward" if self.module_backward is None else "backward"
            raise ConfigurationError(
                f"strategy {strategy.alias or type(strategy).__name__!r} runs the backward passes itself, so {name} of "
                f"{self.model_name} or of a callback can't be called: leave it out, or use another strategy"
            )
        self.module_zero_grad = module_hook(module, "optimizer_zero_grad")
        self.module_clip = module_hook(module, "configure_gradient_clipping")
        self.module_step = module_hook(module, "optimizer_step")
        self.may_clip = "owns_clipping" not in strategy.features
        self.closure_inside = self.module_step is not None or any(map(needs_closure, self.optimizers))
        self.shares_loss = run.world_size > 1 and any(map(needs_closure, self.optimizers))
        self.plain_backward = (
            self.module_backward is None
            and strategy.mark_step is None
            and not overrides(strategy, Strategy, "backward")
            and not overrides(strategy.precision, Precision, "backward")
        )
        self.own_zero_grad = strategy.zero_grad if overrides(strategy, Strategy, "zero_grad") else None
        self.plain_step = (
            strategy.mark_step is None
            and not overrides(strategy, Strategy, "optimizer_step")
            and not overrides(strategy.precision, Precision, "optimizer_step")
        )

    # -- automatic -------------------------------------------------------------------------------------------

    def step(self, batch: Any, batch_idx: int, first: bool, update: bool) -> Any:
        """Train on one batch; what ``training_step`` returned."""
        if not self.automatic:
            return self.run_step(batch, batch_idx, 0)
        if self.owns_step or not self.optimizers:
            output = self.run_step(batch, batch_idx, 0)
            self.progress.count_step()
            return output
        if self.no_sync is not None:
            self.averages = update
            if not update:
                with self.no_sync:
                    return self.forward_backward(batch, batch_idx, first)
            self.skipped = False
        if self.closure_inside and update:
            return self._step_with_closure(batch, batch_idx, first)
        output = self.forward_backward(batch, batch_idx, first)
        if update and self.progress.has_gradients:
            self._sync_skipped()
            self._update()
        return output

    def _sync_skipped(self) -> None:
        """The backward that was to average what accumulated before it did not run: do it by hand."""
        if self.skipped and self.no_sync is not None:
            self.strategy.sync_gradients()

    def finish(self) -> bool:
        """Step with an accumulation that the end of the data cut short; whether there was one."""
        if not (self.automatic and self.progress.has_gradients and self.accumulate > 1):
            return False
        self.strategy.sync_gradients()  # its last backward ran as if more were to come
        self._update()
        return True

    def _update(self) -> None:
        optimizer = self.optimizers[0]
        if not self.owns_accumulation:  # its engine alone knows which of the batches ends a step
            self.before_update(optimizer)
        if self.plain_step:
            optimizer.step()
            stepped: int | None = True
        else:
            stepped = self.strategy.optimizer_step(optimizer)
        self.progress.has_gradients = False
        self._count(stepped)

    def _count(self, stepped: int | None) -> None:
        if stepped is not None:
            self.progress.count_step(stepped)

    def forward_backward(self, batch: Any, batch_idx: int, first: bool) -> Any:
        if self.owns_backward:
            if first or not self.progress.has_gradients:
                self._zero_grad(batch_idx)
            self.progress.has_gradients = True
            output = self.run_step(batch, batch_idx, 0)
            if self.check_finite and (found := extract_loss(output, self.model_name)) is not None:
                self._check_finite(found, batch_idx)
            if self.after_backward:
                self.run.hooks.call("on_after_backward")
            return output
        output = self.run_step(batch, batch_idx, 0)
        # the usual loss, a fresh scalar of the graph, passes without a call
        if type(output) is torch.Tensor and output.dim() == 0 and output.grad_fn is not None:
            loss: torch.Tensor = output
        else:
            found = extract_loss(output, self.model_name)
            if found is None:
                self._skip()
                return output
            loss = found
        if self.check_finite:
            self._check_finite(loss, batch_idx)
        if self.accumulate > 1:
            loss = loss / self.accumulate
        if first or not self.progress.has_gradients:
            self._zero_grad(batch_idx)
        if self.before_backward:
            self.run.hooks.call("on_before_backward", loss)
        try:
            if self.plain_backward:
                loss.backward()  # type: ignore[no-untyped-call]
            elif self.module_backward is not None:
                self.strategy.backward(loss, through=self.module_backward)
            else:
                self.strategy.backward(loss)
        except RuntimeError as error:
            if _FREED_GRAPH not in str(error):
                raise
            raise ModelError(
                f"the graph of the loss that {self.model_name}.training_step returned has been used up: leave "
                "loss.backward() out of training_step, for the Trainer calls it, and detach() what is kept from one "
                f"batch to the next. torch says: {str(error).partition('. ')[0]}"
            ) from error
        if self.after_backward:
            self.run.hooks.call("on_after_backward")
        self.progress.has_gradients = True
        return output

    def _skip(self) -> None:
        self.skipped = True
        self._without_loss += 1
        if self._without_loss == _TOO_MANY and self._batches() == _TOO_MANY - 1:  # this one has yet to be counted
            self.run.warn_once(self._no_loss(_TOO_MANY))
        if self.averages and not self.alone:
            # A rank that skips alone would average its next batch with this one of the others, and end a step early.
            batch = self.progress.total_batches
            self.strategy.barrier(f"batch {batch}, for which training_step returned None")

    def _batches(self) -> int:
        """Those that this fit has used."""
        return self.progress.total_batches - self._began_at

    def check_losses(self) -> None:
        """At the end of an epoch: warn, and from the second on raise ModelError, where no batch has given a loss.

        One that gives none is left out, which is right for some and pointless for all.
        """
        if not self._without_loss or self._without_loss < self._batches():
            return
        self._epochs_without_loss += 1
        if self._epochs_without_loss > 1:
            raise ModelError(self._no_loss(self._batches()))
        self.run.warn_once(self._no_loss(self._batches()))

    def _no_loss(self, batches: int) -> str:
        return (
            f"{self.model_name}.training_step has returned None, or a dict whose 'loss' is None, for each of the "
            f"{batches} batch(es) since fit began, so nothing is trained: return the loss. A model that steps its "
            "optimizers itself sets self.automatic_optimization = False, and one that only looks at the data returns "
            "None from configure_optimizers"
        )

    def _zero_grad(self, batch_idx: int) -> None:
        if self.owns_accumulation:
            return
        optimizer = self.optimizers[0]
        if self.before_zero_grad:
            self.run.hooks.call("on_before_zero_grad", optimizer)
        if self.module_zero_grad is not None:
            self.module_zero_grad(self.run.current_epoch, batch_idx, optimizer)
        elif self.own_zero_grad is not None:
            self.own_zero_grad(optimizer)
        else:
            optimizer.zero_grad()

    def before_update(self, optimizer: Optimizer) -> None:
        """Between the last backward and the step: hooks, then clipping."""
        if self.before_step:
            self.strategy.unscale_gradients(optimizer)
            self.run.hooks.call("on_before_optimizer_step", optimizer)
        run = self.run
        if self.module_clip is not None and self.automatic:
            self.strategy.unscale_gradients(optimizer)
            self.module_clip(optimizer, run.gradient_clip_val, run.gradient_clip_algorithm)
        elif self.may_clip and run.gradient_clip_val is not None:
            self.strategy.clip_gradients(optimizer, run.gradient_clip_val, run.gradient_clip_algorithm)

    def _step_with_closure(self, batch: Any, batch_idx: int, first: bool) -> Any:
        """Forward and backward inside ``optimizer.step(closure)``: the model's own optimizer_step, or LBFGS."""
        output: Any = None

        def closure() -> Any:
            nonlocal output, first
            output = self.forward_backward(batch, batch_idx, first)
            first = True  # an optimizer that evaluates again starts from clean gradients
            loss = extract_loss(output, self.model_name)
            if loss is None and needs_closure(self.optimizers[0]):
                raise ModelError(
                    f"{self.model_name}.training_step must return a loss for {type(self.optimizers[0]).__name__}, "
                    "which can't skip a batch (got None)"
                )
            if self.shares_loss and loss is not None:
                # an optimizer decides by it how often to evaluate, and each evaluation averages over the ranks
                loss = self.run.strategy.reduce(loss.detach(), "mean")
            return loss

        wrapped = self.wrapped[0]
        self._stepping = True
        try:
            if self.module_step is not None:
                self.module_step(self.run.current_epoch, batch_idx, wrapped, closure)
            else:
                wrapped.step(closure)
        finally:
            self._stepping = False
        return output

    def user_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """``step`` of a :class:`WrappedOptimizer`."""
        if self.automatic and not self._stepping:
            raise ModelError(
                f"{self.model_name} steps {type(optimizer).__name__} by hand, and the Trainer steps it too: leave "
                "self.optimizers().step() out, or set self.automatic_optimization = False"
            )
        result: Any = None
        self._check_averaged(optimizer)

        def run_closure() -> Any:
            nonlocal result
            result = closure() if closure is not None else None
            if self.automatic:
                if not self.progress.has_gradients:
                    return result
                self._sync_skipped()
            self.before_update(optimizer)
            return result

        if self.closures.get(id(optimizer)) or (closure is not None and "owns_closure" in self.strategy.features):
            stepped = self.strategy.optimizer_step(optimizer, run_closure)
        else:
            run_closure()
            if self.automatic and not self.progress.has_gradients:
                return result  # training_step returned None: there is nothing to step with
            stepped = self.strategy.optimizer_step(optimizer)
        self.progress.has_gradients = False
        self._count(stepped)
        return result

    def _check_averaged(self, optimizer: Optimizer) -> None:
        """Ranks that call ``loss.backward()`` by hand, past the strategy, would drift apart without a word."""
        if self.automatic or self.alone or getattr(self.strategy, "gradients_synced", True):
            return
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            raise ModelError(
                f"{self.model_name}.training_step steps {type(optimizer).__name__} with gradients that are not "
                "averaged over the ranks: call self.manual_backward(loss) instead of loss.backward()"
            )

    def _check_finite(self, loss: torch.Tensor, batch_idx: int) -> None:
        if not bool(torch.isfinite(loss).all()):
            run = self.run
            raise NonFiniteLossError(
                f"the loss is {loss.item()} at epoch {run.current_epoch}, batch {batch_idx}, optimizer step "
                f"{run.global_step}, rank {run.strategy.global_rank}"
            )


def step_schedulers(run: Run, interval: str, count: int, lr_scheduler_step: Callable[[Any, Any], Any] | None) -> None:
    """Step the schedulers of this interval whose frequency divides ``count``."""
    for config in run.strategy.lr_scheduler_configs:
        if config.interval != interval or count % config.frequency:
            continue
        metric = None
        if config.monitor is not None and config.reduce_on_plateau:
            if interval == "step":
                run.results.share_steps()
            metric = run.results.callback_metrics.get(config.monitor)
            if run.world_size > 1:  # ranks that judge by values of their own would part
                metric = run.strategy.broadcast(metric)
            if metric is None:
                if config.strict:
                    raise ConfigurationError(
                        f"the scheduler {type(config.scheduler).__name__} monitors {config.monitor!r}, which was not "
                        f"logged; there are {', '.join(map(repr, run.results.callback_metrics)) or 'no metrics'}"
                    )
                continue
        if lr_scheduler_step is not None:
            lr_scheduler_step(config.scheduler, metric)
        elif metric is not None:
            config.scheduler.step(metric)
        else:
            config.scheduler.step()
