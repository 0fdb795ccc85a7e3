"""Validate, test and save with an average of the weights that training has passed, with WeightAveraging."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from torchhal._arguments import check_bool, check_count, check_device, check_optional_count
from torchhal.errors import ConfigurationError
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._averaged_weights import AveragedWeights
from torchhal.trainer.callbacks._engines import WEIGHTS, refuse_engines
from torchhal.trainer.callbacks._monitor import check_number
from torchhal.trainer.callbacks._whole_state import gathers_weights
from torchhal.trainer.callbacks.base import Callback
from torchhal.trainer.callbacks.stochastic_weight_averaging import StochasticWeightAveraging

if TYPE_CHECKING:
    from torchhal import Trainer

RUNNING = "current_model_state"
"""The field of a checkpoint with the weights that training continues from; ``state_dict`` has the average."""
AVERAGING = "averaging_state"


class WeightAveraging(Callback):
    """Callback that averages the weights while training, by :class:`torch.optim.swa_utils.AveragedModel`.

    Validations, tests and predictions use the average, from its first update on, and so does the ``state_dict`` of
    checkpoints, which hold the weights of training beside it; a resumed run continues both. When the fit ends, the
    model has the average. Under a strategy that shards the model each rank averages its shards. The average is kept in
    the dtype of the weights.

    A subclass may override :meth:`should_update`.

    Args:
        device: where the average is kept; None: on the device of the model.
        use_buffers: average the buffers too; False: they are those of the model.
        avg_fn: ``avg_fn(average, weight, count)`` returns the new average of one parameter, of which it is the
            ``count + 1``-st; by default all count alike.
        multi_avg_fn: the same for lists of parameters, which it changes in place.

    Raises:
        ConfigurationError, TypeError: arguments outside their domain, or both functions; in ``setup``, a second such
            callback, or a strategy whose engine keeps weights of its own.

    .. versionadded:: 0.2
    """

    runs_after_module = True
    """Changes that the model's own hook makes to the weights are averaged."""

    @explain_unknown_arguments
    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Tensor | int], None] | None = None,
    ) -> None:
        self._device = check_device("device", device)
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError("'avg_fn' and 'multi_avg_fn' must not both be given: leave one out")
        for name, function in (("avg_fn", avg_fn), ("multi_avg_fn", multi_avg_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"'{name}' must be a function or None (got {function!r})")
        self._use_buffers = check_bool("use_buffers", use_buffers)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._reset_state()

    def __getstate__(self) -> dict[str, Any]:
        # What the present process averages stays in it, as the model does.
        return {**vars(self), "_average": None, "_averaged": None, "_in_use": False, "_evaluating": False}

    def _reset_state(self) -> None:
        self._average: AveragedWeights | None = None
        self._averaged: weakref.ref[nn.Module] | None = None
        """The model that the average belongs to."""
        self._in_use = False
        """Whether the model has the average, and the average's place the weights of training."""
        self._evaluating = False
        """Whether that ends with the present evaluation."""
        self._saved: tuple[Mapping[str, Any], int] | None = None
        """The average in the checkpoint that this fit continues from, and how many states it is of."""
        self._catches_up = False
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now, the same on every rank.

        Args:
            step_idx: the optimizer step that has ended, from 0; None at the end of an epoch.
            epoch_idx: the epoch that has ended, from 0; None after a step.
        """
        return step_idx is not None

    # -- updates -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        refuse_engines(trainer, self, WEIGHTS, "may keep weights of its own")
        if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
            raise ConfigurationError(
                f"'callbacks' must not hold a StochasticWeightAveraging beside {type(self).__name__}: each gives the "
                "model its average when the fit ends. Leave one out"
            )
        if sum(isinstance(each, WeightAveraging) for each in trainer.callbacks) > 1:
            raise ConfigurationError(
                "'callbacks' must not hold two WeightAveragings: both would be the state_dict of a checkpoint"
            )
        self._saved = None

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        saved, self._saved = self._saved, None
        if trainer.ckpt_path is not None:
            self._forget()
        elif self._in_use and self._is_of(module):
            self._swap(module)  # a second fit goes on with the weights of training
        elif self._average is not None and not self._is_of(module):
            self._forget()
        if saved is not None:
            state, count = saved
            strict = getattr(module, "strict_loading", True)
            self._average, self._averaged = self._new_average(module), weakref.ref(module)
            self._average.load(module, lambda: trainer.strategy.load_module_state_dict(state, strict=strict))
            self._average.n_averaged = count

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._catch_up(trainer, module)

    def _catch_up(self, trainer: Trainer, module: nn.Module) -> None:
        """Make the updates that were due when another callback saved before this one."""
        if self._catches_up:
            self._update_after_step(trainer, module)
            if not trainer.fit_loop.progress.batches_done:
                self._update_after_epoch(module, trainer.current_epoch - 1)
        self._catches_up = False

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._update_after_step(trainer, module)

    def _update_after_step(self, trainer: Trainer, module: nn.Module) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(module)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self._update_after_epoch(module, trainer.current_epoch)

    def _update_after_epoch(self, module: nn.Module, epoch: int) -> None:
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(module)
            self._latest_update_epoch = epoch

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        """Leave the average in the model; the weights of training stay here, for another fit."""
        if self._average is not None:
            self._swap(module)

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        """Do so as well where a continued fit had nothing to do."""
        self._catch_up(trainer, module)
        if not self._in_use and self._is_of(module):
            self._swap(module)

    def _update(self, module: nn.Module) -> None:
        if self._average is None:
            self._average, self._averaged = self._new_average(module), weakref.ref(module)
        self._average.update(module)

    def _new_average(self, module: nn.Module) -> AveragedWeights:
        return AveragedWeights(
            module,
            self._device,
            use_buffers=self._use_buffers,
            avg_fn=self._avg_fn,
            multi_avg_fn=self._multi_avg_fn,
        )

    def _is_of(self, module: nn.Module) -> bool:
        """Return whether the average, and what stands in its place, belongs to ``module`` as it is."""
        own = None if self._averaged is None else self._averaged()
        return self._average is not None and own is module and self._average.matches(module)

    def _swap(self, module: nn.Module) -> None:
        assert self._average is not None
        self._average.swap(module)
        self._in_use = not self._in_use

    def _forget(self) -> None:
        self._average = self._averaged = None
        self._in_use = self._evaluating = False

    # -- evaluations -------------------------------------------------------------------------------------------------

    def _begin_evaluation(self, module: nn.Module) -> None:
        if not self._in_use and self._is_of(module):
            self._swap(module)
            self._evaluating = True

    def _end_evaluation(self, module: nn.Module) -> None:
        if self._evaluating:
            self._swap(module)
            self._evaluating = False

    def on_validation_epoch_start(self, trainer: Trainer, module: Any) -> None:
        self._begin_evaluation(module)

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self._end_evaluation(module)

    def on_test_epoch_start(self, trainer: Trainer, module: Any) -> None:
        self._begin_evaluation(module)

    def on_test_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self._end_evaluation(module)

    def on_predict_epoch_start(self, trainer: Trainer, module: Any) -> None:
        self._begin_evaluation(module)

    def on_predict_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self._end_evaluation(module)

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._end_evaluation(module)  # an error or a signal has cut it short

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the average as ``state_dict``, and the weights of training beside it."""
        if self._average is None:
            return
        if not self._is_of(module):
            trainer.warn_once(
                f"{type(self).__name__} saves the average alone: the weights of training are divided among the ranks "
                "of a fit that has ended. Save with a ModelCheckpoint during the fit"
            )
            return
        present = checkpoint["state_dict"]
        names = dict(module.named_parameters(remove_duplicate=False)).keys()
        renamed = not names <= present.keys()  # by a hook of the model's
        if renamed or gathers_weights(trainer.strategy):
            present = _copied(present)
            self._average.swap(module)
            try:
                other = _copied(trainer.strategy.module_state_dict())
            finally:
                self._average.swap(module)
        else:
            held = self._average.by_name(module)
            other = {name: held.get(name, value) for name, value in present.items()}
        running, average = (other, present) if self._in_use else (present, other)
        checkpoint["state_dict"] = average
        if "optimizer_states" in checkpoint:
            checkpoint[RUNNING] = running
            checkpoint[AVERAGING] = {"n_averaged": self._average.n_averaged}

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Let the fit continue from the weights of training; the average is loaded when they are in place."""
        self._saved = None
        if trainer.state.fn != "fit":
            self._forget()  # the model gets the checkpoint's average
        elif RUNNING in checkpoint:
            count = int(checkpoint.get(AVERAGING, {}).get("n_averaged", 1))
            self._saved = checkpoint["state_dict"], count
            checkpoint["state_dict"] = checkpoint.pop(RUNNING)

    def state_dict(self) -> dict[str, Any]:
        return {"latest_update_step": self._latest_update_step, "latest_update_epoch": self._latest_update_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._catches_up = True
        self._latest_update_step = check_count("latest_update_step", state_dict["latest_update_step"], minimum=0)
        epoch = state_dict.get("latest_update_epoch", -1)
        self._latest_update_epoch = check_count("latest_update_epoch", epoch, minimum=-1)


class EMAWeightAveraging(WeightAveraging):
    """Callback that keeps an exponential moving average of the weights; see :class:`WeightAveraging`.

    Args:
        device: where the average is kept; None: on the device of the model.
        use_buffers: average the buffers too; False: they are those of the model.
        decay: the share of the average that an update keeps, from 0 to 1.
        update_every_n_steps: update after every n-th optimizer step, the first one included; 0: not by steps.
        update_starting_at_step: the first step, from 0, after which it may.
        update_starting_at_epoch: update at the end of each epoch from this one on, counted from 0; None: not by epochs.

    Raises:
        ConfigurationError, TypeError, ValueError: an argument outside its domain.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0 <= check_number("decay", decay) <= 1:
            raise ValueError(f"'decay' must be from 0 to 1 (got {decay!r})")
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = check_count("update_every_n_steps", update_every_n_steps, minimum=0)
        self.update_starting_at_step = check_optional_count(
            "update_starting_at_step", update_starting_at_step, minimum=0
        )
        self.update_starting_at_epoch = check_optional_count(
            "update_starting_at_epoch", update_starting_at_epoch, minimum=0
        )
        if not update_every_n_steps and update_starting_at_epoch is None:
            raise ConfigurationError(
                "'update_every_n_steps' can be 0 only beside 'update_starting_at_epoch': else nothing is ever averaged"
            )

    def _new_average(self, module: nn.Module) -> AveragedWeights:
        # Made here: a function within a function doesn't pickle.
        average = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return AveragedWeights(module, self._device, use_buffers=self._use_buffers, multi_avg_fn=average)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            every = self.update_every_n_steps
            return step_idx >= (self.update_starting_at_step or 0) and every > 0 and step_idx % every == 0
        start = self.update_starting_at_epoch
        return epoch_idx is not None and start is not None and epoch_idx >= start


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state whose tensors share no memory with the model; those without values stay."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in state.items()
    }
