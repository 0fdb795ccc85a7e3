"""Average the weights of the last epochs at a learning rate of their own, with StochasticWeightAveraging."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR

from torchhal._arguments import check_bool, check_count, check_device
from torchhal.errors import CheckpointMismatchError, ConfigurationError
from torchhal.trainer._configure_optimizers import SchedulerConfig
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._averaged_weights import AveragedWeights
from torchhal.trainer.callbacks._batch_norm_update import update_batch_norms
from torchhal.trainer.callbacks._engines import OPTIMIZERS, refuse_engines
from torchhal.trainer.callbacks._monitor import check_number
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class StochasticWeightAveraging(Callback):
    """Callback that gives the model, when the fit ends, the average of the weights with which its last epochs began.

    From epoch ``swa_epoch_start`` on, counted from 1, :class:`torch.optim.swa_utils.SWALR` takes the place of the
    model's scheduler. The average is made by :class:`torch.optim.swa_utils.AveragedModel`, and while training it is
    neither validated nor the ``state_dict`` of a checkpoint. If the model has batch norms, one more pass over the
    training data, by ``training_step`` and without logging, makes their running statistics anew. Save the result with
    ``trainer.save_checkpoint`` after the fit.

    Args:
        swa_lrs: the learning rate to anneal to: a number, or a list with one for each parameter group.
        swa_epoch_start: the first epoch of the average: its number, from 1, or a share of ``max_epochs``, from 0 to 1.
        annealing_epochs: epochs in which the rate gets there; 0: at once.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: ``avg_fn(average, parameter, count)`` returns the new average of a parameter; by default all states
            count alike.
        device: where the average is kept; None: on the device of the model.

    Raises:
        ConfigurationError, TypeError, ValueError: an argument outside its domain. In ``setup`` and ``on_fit_start``:
            manual optimization, several optimizers or schedulers, a share without ``max_epochs``, sharded parameters,
            or a strategy whose engine has optimizers of its own.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        given = list(swa_lrs) if isinstance(swa_lrs, Sequence) else [swa_lrs]
        if not given or not all(0 < check_number("swa_lrs", rate) < math.inf for rate in given):
            raise ValueError(f"'swa_lrs' must be a positive finite number, or a list of them (got {swa_lrs!r})")
        self._swa_lrs: float | list[float] = given if isinstance(swa_lrs, Sequence) else swa_lrs
        if isinstance(swa_epoch_start, float) and not 0 <= swa_epoch_start <= 1:
            raise ValueError(f"'swa_epoch_start' must be an epoch or a share from 0.0 to 1.0 (got {swa_epoch_start!r})")
        self._swa_epoch_start: int | float = (
            swa_epoch_start
            if isinstance(swa_epoch_start, float)
            else check_count("swa_epoch_start", swa_epoch_start, minimum=1)
        )
        self._annealing_epochs = check_count("annealing_epochs", annealing_epochs, minimum=0)
        if annealing_strategy not in ("cos", "linear"):
            raise ValueError(f"'annealing_strategy' must be 'cos' or 'linear' (got {annealing_strategy!r})")
        self._annealing_strategy = annealing_strategy
        if avg_fn is not None and not callable(avg_fn):
            raise TypeError(f"'avg_fn' must be a function or None (got {avg_fn!r})")
        self._avg_fn = avg_fn
        self._device = check_device("device", device)
        self._reset_state()

    def _reset_state(self) -> None:
        self._average: AveragedWeights | None = None
        self._averaged: weakref.ref[nn.Module] | None = None
        """The model that the average belongs to."""
        self._parameters: dict[str, Tensor] = {}
        """The averaged parameters, which share the average's memory, or a checkpoint's."""
        self._n_averaged = 0
        self._latest_update_epoch = -1
        self._scheduler: SWALR | None = None
        self._has_scheduler = False
        """Whether it is in place of the model's, in this fit or in the one that is continued."""
        self._has_ended = False
        """Whether this fit has given the model the average."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_average": None,
            "_averaged": None,
            "_scheduler": None,
        }  # made again, from the parameters and the state

    # -- the run -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._scheduler = None
        self._has_scheduler = False
        self._has_ended = False
        refuse_engines(trainer, self, OPTIMIZERS, "sets up optimizers and schedulers once for a fit")
        name = type(self).__name__
        if not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{name} needs automatic optimization: {type(module).__name__}.training_step steps the optimizers "
                "itself"
            )
        if isinstance(self._swa_epoch_start, float) and trainer.max_epochs in (None, -1):
            raise ConfigurationError(
                f"'swa_epoch_start' must be an epoch where max_epochs={trainer.max_epochs} (got the share "
                f"{self._swa_epoch_start!r} of it)"
            )
        epochs = trainer.max_epochs
        if epochs not in (None, -1) and self.swa_start(trainer) >= max(epochs, 1):
            trainer.warn_once(
                f"{name} averages nothing: it begins in epoch {self._swa_epoch_start}, and max_epochs={epochs}"
            )

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """Raise ConfigurationError for a model, optimizers or schedulers that can't be averaged."""
        own = None if self._averaged is None else self._averaged()
        if own is not None and own is not module and trainer.ckpt_path is None:  # another model's average
            self._reset_state()
        name = type(self).__name__
        for what, count in (("optimizer", len(trainer.optimizers)), ("scheduler", len(trainer.lr_scheduler_configs))):
            if count > 1:
                raise ConfigurationError(f"{name} works with one {what} (the model has {count})")
        if not trainer.optimizers:
            raise ConfigurationError(f"{name} needs an optimizer, and the model has none")
        if any(hasattr(parameter, "to_local") or parameter.is_meta for parameter in module.parameters()):
            raise ConfigurationError(
                f"{name} can't average parameters that strategy {trainer.strategy.display_name!r} shards: use "
                "WeightAveraging, which averages each shard, or another strategy"
            )

    def swa_start(self, trainer: Trainer) -> int:
        """Return the first epoch of the average, from 0."""
        start = self._swa_epoch_start
        first = int(start * (trainer.max_epochs or 0)) if isinstance(start, float) else start
        return max(first - 1, 0)

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        epoch = trainer.current_epoch
        if epoch < self.swa_start(trainer) and not self._n_averaged:  # a later max_epochs doesn't end it
            return
        if self._scheduler is None:
            self._exchange_scheduler(trainer)
        if epoch > self._latest_update_epoch:  # else continued in the midst of it
            self._update(module)
            self._latest_update_epoch = epoch

    def _exchange_scheduler(self, trainer: Trainer) -> None:
        """Let SWALR be the scheduler of the optimizer, once per epoch."""
        (optimizer,) = trainer.optimizers
        rates, groups = self._swa_lrs, len(optimizer.param_groups)
        if isinstance(rates, list) and len(rates) != groups:
            raise ConfigurationError(
                f"'swa_lrs' must hold a rate for each of the {groups} parameter group(s) (got {len(rates)})"
            )
        self._scheduler = SWALR(
            optimizer,
            rates,  # type: ignore[arg-type]
            anneal_epochs=self._annealing_epochs,
            anneal_strategy=self._annealing_strategy,  # type: ignore[arg-type]
        )
        self._has_scheduler = True
        trainer.lr_scheduler_configs[:] = [SchedulerConfig(self._scheduler)]

    def _update(self, module: nn.Module) -> None:
        average = self._average_of(module)
        average.update(module)
        self._n_averaged = average.n_averaged

    def _average_of(self, module: nn.Module) -> AveragedWeights:
        """Return the average, made anew from its parameters after a restart."""
        if self._average is None:
            average = AveragedWeights(module, self._device, avg_fn=self._avg_fn)
            own = average.parameters_by_name(module)
            if self._n_averaged:
                _load(own, self._parameters)
                average.n_averaged = self._n_averaged
            self._average, self._parameters, self._averaged = average, own, weakref.ref(module)
        return self._average

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        """Give the model the average, and its batch norms the statistics of that."""
        if self._n_averaged:
            self._average_of(module).copy_parameters_to(module)
            update_batch_norms(trainer, module)
        self._has_ended = True

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        """Do so as well where a continued fit had nothing to do."""
        if not self._has_ended:
            self.on_train_end(trainer, module)

    # -- state -------------------------------------------------------------------------------------------------------

    def _restore_optimizers(self, trainer: Trainer, module: Any, state: Mapping[str, Any] | None) -> None:
        if state is not None and state["has_scheduler"]:
            self._exchange_scheduler(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_averaged": self._n_averaged,
            "latest_update_epoch": self._latest_update_epoch,
            "has_scheduler": self._has_scheduler,
            "average_model_state": dict(self._parameters),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        count = check_count("n_averaged", state_dict["n_averaged"], minimum=0)
        epoch = check_count("latest_update_epoch", state_dict["latest_update_epoch"], minimum=-1)
        has_scheduler = check_bool("has_scheduler", state_dict["has_scheduler"])
        self._n_averaged, self._latest_update_epoch, self._has_scheduler = count, epoch, has_scheduler
        self._parameters, self._average = dict(state_dict["average_model_state"]), None


@torch.no_grad()
def _load(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name not in saved or saved[name].shape != tensor.shape:
            raise CheckpointMismatchError(f"the average in the checkpoint has no parameter {name!r} of this shape")
        tensor.copy_(saved[name])
