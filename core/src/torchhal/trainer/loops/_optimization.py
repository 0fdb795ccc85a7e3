"""Turn a batch into a training step: forward, backward, clipping and the optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal._overrides import overrides
from torchhal.errors import ConfigurationError, LaunchError, ModelError, NonFiniteLossError
from torchhal.precision import Precision
from torchhal.precision.base import needs_closure
from torchhal.strategies import StepResult, Strategy
from torchhal.trainer._call_signatures import adapt_step
from torchhal.trainer._hooks import module_hook
from torchhal.trainer._run_part import RunPart
from torchhal.trainer._settings import refuse_by_hand
from torchhal.trainer.run_state import RunState

# Messages of errors of torch's autograd engine, which have no specific class.
_FREED_GRAPH = "backward through the graph a second time"
_AUTOGRAD_AFTER_FORK = "autograd's threading in combination with fork"

_TOO_MANY = 100
"""Batches without a loss from the beginning of a fit, after which a warning is given."""


class WrappedOptimizer:
    """An optimizer for user code: ``step`` goes through precision, strategy, hooks and counters.

    It is valid for one fit; the next one has new ones.
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
        if name.startswith("__"):  # which copy and pickle access before there is an optimizer
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return f"WrappedOptimizer({self.optimizer!r})"


def extract_loss(output: Any, model: str, source: str | None = None) -> torch.Tensor | None:
    """Return the loss in what ``training_step`` returned; None where it returned none.

    Args:
        output: a tensor, a mapping with ``"loss"``, or None.
        model: name of the module's class, for the message.
        source: what has returned it, if that is not the model's ``training_step``.

    Raises:
        ModelError: there is no loss in it, or one that is no single number or depends on no parameter.
    """
    source = f"{model}.training_step" if source is None else source
    loss = output
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise ModelError(
                f"{source} must return a tensor, a dict with 'loss', or None (got a dict with "
                f"{', '.join(map(repr, output)) or 'nothing'})"
            )
        loss = output["loss"]
    if loss is None:
        return None
    if not isinstance(loss, torch.Tensor):
        raise ModelError(f"{source} must return a tensor, a dict with 'loss', or None (got {output!r})")
    if loss.numel() != 1:
        raise ModelError(
            f"{source} must return one number to minimise (got a tensor of shape {tuple(loss.shape)}): take its mean"
        )
    if loss.grad_fn is None and not loss.requires_grad:
        raise ModelError(f"the loss that {source} returned depends on no trainable parameter: nothing requires grad")
    return loss


class Optimization(RunPart[RunState]):
    """One training step, set up once: which hooks run, what clips, whether gradients accumulate.

    :meth:`step` is called for every batch. ``update``: whether this batch ends an accumulation.
    """

    def __init__(self, run: RunState) -> None:
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
        self.wrapped: list[Any] = [WrappedOptimizer(optimizer, self) for optimizer in self.optimizers]
        if (adapter := self.run.adapters.of(self.module)) is not None:
            self.wrapped = list(map(adapter.wrap_optimizer, self.wrapped))
        self.closures = {id(optimizer): needs_closure(optimizer) for optimizer in self.optimizers}
        strategy = self.strategy
        if self.automatic and ("owns_step" in strategy.features or overrides(strategy, Strategy, "optimizer_step")):
            for optimizer in self.optimizers:  # whose step may never be called; torch's schedulers warn of that
                optimizer._opt_called = True  # type: ignore[attr-defined]

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
        """Set the number of batches per step; only at the beginning of one."""
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
                f"strategy {strategy.display_name!r} runs the backward passes itself, so {name} of "
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
        # the gradients of the last step would lie beside all activations of this one; hooks are called where Lightning
        # calls them, between forward and backward
        self.clears_early = not self.before_zero_grad and self.module_zero_grad is None
        self.plain_step = (
            strategy.mark_step is None
            and not overrides(strategy, Strategy, "optimizer_step")
            and not overrides(strategy.precision, Precision, "optimizer_step")
        )

    # -- automatic -------------------------------------------------------------------------------------------

    def step(self, batch: Any, batch_idx: int, first: bool, update: bool) -> Any:
        """Train on one batch and return what ``training_step`` returned."""
        if not self.automatic:
            output = self.run_step(batch, batch_idx, 0)
            if not (output is None or isinstance(output, torch.Tensor | Mapping)):
                raise ModelError(
                    f"{self.model_name}.training_step must return a tensor, a dict or None (got {output!r})"
                )
            return output
        if self.owns_step or not self.optimizers:
            output = self.run_step(batch, batch_idx, 0)
            self.progress.count_step(StepResult.UPDATED)
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
        """Average the accumulated gradients explicitly if the backward that averages them did not run."""
        if self.skipped and self.no_sync is not None:
            self.strategy.sync_gradients()

    def finish(self) -> bool:
        """Step with an accumulation that the end of the data cut short; whether there was one."""
        if not (self.automatic and self.progress.has_gradients and self.accumulate > 1):
            return False
        self.strategy.sync_gradients()  # its last backward ran without averaging
        self._update()
        return True

    def _update(self) -> None:
        optimizer = self.optimizers[0]
        if not self.owns_accumulation:  # only its engine determines which batch ends a step
            self.before_update(optimizer)
        if self.plain_step:
            optimizer.step()
            result = StepResult.UPDATED
        else:
            result = StepResult.of(self.strategy.optimizer_step(optimizer))
        self.progress.has_gradients = False
        self.progress.count_step(result)

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
        clears = first or not self.progress.has_gradients
        if clears and self.clears_early:
            self._zero_grad(batch_idx)
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
        if clears and not self.clears_early:
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
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error
        if self.after_backward:
            self.run.hooks.call("on_after_backward")
        self.progress.has_gradients = True
        return output

    def _explained(self, error: RuntimeError) -> RuntimeError | ModelError:
        """Return the error to raise for one of torch's autograd engine, which names neither cause nor solution."""
        text = str(error)
        if _FREED_GRAPH in text:
            return ModelError(
                f"the graph of the loss that {self.model_name}.training_step returned has been used up: leave "
                "loss.backward() out of training_step, for the Trainer calls it, and detach() what is kept from one "
                f"batch to the next. torch says: {text.partition('. ')[0]}"
            )
        if _AUTOGRAD_AFTER_FORK in text:
            return LaunchError(
                "the process that started this worker by fork has run a backward with an accelerator loaded, and a "
                "fork lacks the threads that autograd started for it: use strategy='ddp_spawn', or fit in a new process"
            )
        return error

    def _skip(self) -> None:
        self.skipped = True
        self._without_loss += 1
        if self._without_loss == _TOO_MANY and self._batches() == _TOO_MANY - 1:  # this one is not counted yet
            self.run.warn_once(self._no_loss(_TOO_MANY))
        if self.averages and not self.alone:
            # A rank that skips a batch others don't would average its next one with this one of theirs, and step early.
            batch = self.progress.total_batches
            self.strategy.barrier(f"batch {batch}, for which training_step returned None")

    def _batches(self) -> int:
        """Those that this fit has used."""
        return self.progress.total_batches - self._began_at

    def check_losses(self) -> None:
        """At the end of an epoch: warn, and from the second on raise ModelError, if no batch has returned a loss.

        A batch without a loss is skipped, which is valid for some batches but not for all.
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
        evaluated = False

        def closure() -> Any:
            nonlocal output, first, evaluated
            evaluated = True
            output = self.forward_backward(batch, batch_idx, first)
            first = True  # an optimizer that evaluates again starts from zero gradients
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
        if not evaluated:
            raise ModelError(
                f"{self.model_name}.optimizer_step has not used the batch: call optimizer.step(closure), or closure() "
                "alone to leave the parameters as they are"
            )
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
            stepped = StepResult.of(self.strategy.optimizer_step(optimizer, torch.enable_grad()(run_closure)))
        else:
            run_closure()
            if self.automatic and not self.progress.has_gradients:
                return result  # training_step returned None: there is nothing to step with
            stepped = StepResult.of(self.strategy.optimizer_step(optimizer))
        self.progress.has_gradients = False
        self.progress.count_step(stepped)
        return result

    def _check_averaged(self, optimizer: Optimizer) -> None:
        """Raise if ranks call ``loss.backward()`` directly, bypassing the strategy: they would silently diverge."""
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
