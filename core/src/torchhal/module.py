"""Define the base classes of models and data: the hooks that a Trainer calls, and what a model may call back.

A model needn't derive from :class:`Module`: any ``nn.Module`` with ``training_step`` and
``configure_optimizers`` trains. Deriving gives it ``self.log``, ``self.trainer`` and the rest.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from torchhal._arguments import check_clip_algorithm, check_clip_val
from torchhal._module_hooks import ModuleHooks
from torchhal._saved_hyperparameters import HasHyperparameters, raising_mismatch
from torchhal._trainer_reference import trainer_of, weak_reference
from torchhal.errors import CheckpointCorruptError, ModelError

if TYPE_CHECKING:
    from torchhal import Trainer

__all__ = ["DataModule", "Module", "ModuleHooks"]


class Module(HasHyperparameters, ModuleHooks, nn.Module):
    """An ``nn.Module`` with a reference to its Trainer.

    A subclass defines ``training_step(batch, batch_idx)``, which returns the loss (a 0-d tensor), a dict with
    the key ``loss``, or None to skip the batch; ``configure_optimizers()``, which returns an optimizer, a pair of
    lists (optimizers, schedulers), a dict with ``optimizer`` and ``lr_scheduler``, or None; and as it needs
    ``validation_step``, ``test_step``, ``predict_step(batch, batch_idx, dataloader_idx=0)``, the loaders'
    functions and hooks. ``torch.jit.script`` and ``torch.jit.trace`` take its ``forward``, before and after a run.
    """

    automatic_optimization = True
    """False: ``training_step`` calls ``manual_backward`` and steps ``self.optimizers()`` itself."""

    __jit_unused_properties__: ClassVar[list[str]] = [
        "current_epoch", "device", "dtype", "global_rank", "global_step", "hparams", "local_rank", "logger", "loggers",
        "trainer",
    ]  # fmt: skip
    """Properties that torch.jit.script doesn't compile beside a model's forward."""

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the model is not a copy of the run: EMA copies, pickles and deepcopies leave the trainer behind
        state = dict(self.__dict__)
        state.pop("_trainer", None)
        return state

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the latest call, which the model doesn't keep alive."""
        trainer: Trainer | None = trainer_of(self)
        if trainer is None:
            # torch.jit reads every attribute that a class has, and takes an AttributeError for none
            by_jit = sys._getframe(1).f_globals.get("__name__", "").startswith(("torch.jit.", "torch._jit_internal"))
            kind = AttributeError if by_jit else RuntimeError
            raise kind(
                f"{type(self).__name__} is not attached to a Trainer: call it from a hook or a step, or keep the "
                "Trainer that has run it"
            )
        return trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self.__dict__["_trainer"] = weak_reference(trainer)

    # -- where and when --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        tensor: torch.Tensor | None = next(self.parameters(), None)
        if tensor is None:
            tensor = next(self.buffers(), None)
        if tensor is not None:
            return tensor.device
        trainer = trainer_of(self)
        return trainer.strategy.root_device if trainer is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        for parameter in self.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
        return torch.get_default_dtype()

    @property
    def current_epoch(self) -> int:
        trainer = trainer_of(self)
        return 0 if trainer is None else trainer.current_epoch

    @property
    def global_step(self) -> int:
        trainer = trainer_of(self)
        return 0 if trainer is None else trainer.global_step

    @property
    def global_rank(self) -> int:
        trainer = trainer_of(self)
        return 0 if trainer is None else trainer.global_rank

    @property
    def local_rank(self) -> int:
        trainer = trainer_of(self)
        return 0 if trainer is None else trainer.local_rank

    @property
    def logger(self) -> Any:
        trainer = trainer_of(self)
        return None if trainer is None else trainer.logger

    @property
    def loggers(self) -> list[Any]:
        trainer = trainer_of(self)
        return [] if trainer is None else trainer.loggers

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print on rank 0, beside the progress bar."""
        trainer = trainer_of(self)
        (print if trainer is None else trainer.print)(*values, **kwargs)

    # -- logging ---------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        sync_dist: bool | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        metric_attribute: str | None = None,
    ) -> None:
        """Record one number.

        Args:
            name: the key in ``callback_metrics`` and the loggers. ``"step"`` is the step at which the loggers record
                what is logged with it, in place of the number of optimizer steps.
            value: a tensor of one element, a number, or a metric object with ``compute`` and ``reset``.
            prog_bar: show it in the progress bar.
            logger: give it to the loggers (default: yes).
            on_step: record each step's value (default: in training steps).
            on_epoch: record the epoch's reduction (default: everywhere else).
            reduce_fx: "mean" (weighted by batch size), "sum", "min" or "max".
            sync_dist: None: epoch values are reduced over all ranks, step values are this rank's; True: step
                values too, one collective each; False: neither.
            add_dataloader_idx: append ``/dataloader_idx_N`` when there are several loaders.
            batch_size: the weight of this value; taken from the batch when None.
            rank_zero_only: this is only called on rank 0; nothing is reduced.
            metric_attribute: the attribute of the model that holds a metric object, for ranks that never log it.
        """
        trainer = trainer_of(self)
        if trainer is None:
            self._warn_unlogged([name])
            return
        trainer.results.log(
            name, value, trainer.current_hook, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist,
            add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
        )  # fmt: skip

    def log_dict(self, metrics: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Call :meth:`log` for each item of ``metrics``."""
        if trainer_of(self) is None:
            self._warn_unlogged(metrics)
            return
        if not hasattr(metrics, "items"):  # torchmetrics' MetricCollection is no Mapping
            raise TypeError(
                f"'metrics' of self.log_dict must map names to values (got {metrics!r}); use self.log for one value"
            )
        for name, value in metrics.items():
            self.log(name, value, *args, **options)

    def _warn_unlogged(self, names: Iterable[str]) -> None:
        """Warn of a log call in a model without a Trainer; Python shows it once for each line that logs."""
        warnings.warn(
            f"{', '.join(map(repr, names))} of {type(self).__name__} goes nowhere: self.log needs a Trainer, which a "
            "model has from fit, validate, test or predict on, as long as that Trainer is there",
            UserWarning,
            stacklevel=3,
        )

    # -- manual optimization ---------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of several, whose ``step`` goes through precision and strategy.

        Args:
            use_pl_optimizer: False gives torch's own objects.
        """
        wrapped = self.trainer.wrapped_optimizers if use_pl_optimizer else self.trainer.optimizers
        return wrapped[0] if len(wrapped) == 1 else list(wrapped)

    def lr_schedulers(self) -> Any:
        """Return None, the scheduler, or the list of several."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients in place of ``loss.backward()``: scaled as the precision needs, averaged over the ranks."""
        if self.automatic_optimization:
            raise ModelError(
                f"{type(self).__name__}.manual_backward needs manual optimization: set "
                "self.automatic_optimization = False"
            )
        self.trainer.strategy.manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> torch.Tensor | None:
        """Clip between the last backward and the step, in manual optimization or ``configure_gradient_clipping``.

        Args:
            optimizer: the one whose parameters' gradients are clipped.
            gradient_clip_val: the largest norm or value; None or 0 for no clipping.
            gradient_clip_algorithm: "norm", the default, or "value".

        Returns:
            The norm over all gradients before, on whichever ranks they are; None where nothing is clipped by it.

        Raises:
            ConfigurationError: an argument outside its domain.
        """
        gradient_clip_val = check_clip_val("gradient_clip_val", gradient_clip_val)
        gradient_clip_algorithm = check_clip_algorithm("gradient_clip_algorithm", gradient_clip_algorithm)
        if gradient_clip_val is None:
            return None
        norm: torch.Tensor | None = self.trainer.strategy.clip_gradients(
            getattr(optimizer, "optimizer", optimizer), gradient_clip_val, gradient_clip_algorithm
        )
        return norm

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients, until :meth:`untoggle_optimizer`."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        toggled: dict[nn.Parameter, bool] = self.__dict__.setdefault("_toggled", {})
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    toggled.setdefault(parameter, parameter.requires_grad)
                    parameter.requires_grad_(id(parameter) in own and toggled[parameter])

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo :meth:`toggle_optimizer`."""
        for parameter, before in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad_(before)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return every tensor of ``data`` gathered from all ranks, with a new first dimension of the world's size."""
        from torchhal.pytree import map_tensors

        gather = self.trainer.strategy.all_gather
        return map_tensors(
            data,
            lambda leaf: (
                gather(torch.as_tensor(leaf), group=group, sync_grads=sync_grads)
                if isinstance(leaf, torch.Tensor | int | float)
                else leaf
            ),
        )

    def _restore(self, checkpoint: dict[str, Any], path: str, *, strict: bool) -> None:
        from torchhal.checkpoint._trainer_format import check_dtypes, check_has_weights

        check_has_weights(checkpoint, path)
        self.on_load_checkpoint(checkpoint)
        with raising_mismatch(lambda error: f"{path!r}: the weights don't belong to {type(self).__name__}: {error}"):
            check_dtypes(checkpoint["state_dict"], self, path)
            self.load_state_dict(checkpoint["state_dict"], strict=strict)


class DataModule(HasHyperparameters):
    """The data of a run as an object: what loads it, prepares it and returns the loaders.

    A subclass defines those of ``train_dataloader``, ``val_dataloader``, ``test_dataloader`` and
    ``predict_dataloader`` that it has; each returns a loader or a list of them.
    """

    _hyperparameter_prefix = "datamodule_"

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the data is not a copy of the run
        state = dict(self.__dict__)
        state.pop("_trainer", None)
        return state

    @property
    def trainer(self) -> Any:
        """The Trainer of the latest call, which the data module doesn't keep alive; None without one."""
        return trainer_of(self)

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.__dict__["_trainer"] = weak_reference(trainer)

    def prepare_data(self) -> None:
        """Download and unpack, on local rank 0 of each node. Sets no state."""

    def setup(self, stage: str) -> None:
        """Set up on every rank; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Clean up on every rank, at the end."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain data to save with a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it: after ``setup``, before the first loader is made, in every call that starts from a checkpoint."""

    def _restore(self, checkpoint: dict[str, Any], path: str, *, strict: bool) -> None:
        name = type(self).__qualname__
        state = checkpoint.get(name, {})
        if not isinstance(state, dict):
            raise CheckpointCorruptError(f"{path!r} is damaged: its field {name!r} must be a dict (got {state!r:.80})")
        with raising_mismatch(
            lambda error: (
                f"{path!r}: {name}.load_state_dict raised {type(error).__name__} for the field {name!r}: {error}"
            )
        ):
            self.load_state_dict(state)
