"""The convenient base of models and data: what a Trainer calls, with empty bodies, and what a model may call back.

A model needn't derive from :class:`Module`: any ``nn.Module`` with ``training_step`` and
``configure_optimizers`` trains. Deriving gives it ``self.log``, ``self.trainer`` and the rest.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from torchhal._arguments import check_bool, check_clip_algorithm, check_clip_val, check_path
from torchhal._hyperparameters import Hyperparameters
from torchhal.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ConfigurationError,
    ModelError,
    TorchhalError,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchhal import Trainer


_NEVER_OF_A_FILE = TorchhalError, ImportError, MemoryError, torch.OutOfMemoryError
"""Errors of user code that say themselves what is wrong, whatever a checkpoint holds."""


@contextmanager
def _mismatch(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Raise what the user's code raises on a checkpoint's content as a CheckpointMismatchError."""
    try:
        yield
    except _NEVER_OF_A_FILE:
        raise
    except Exception as error:  # what it raises depends on what is wrong, and on the user's code
        raise CheckpointMismatchError(describe(error)) from error


if TYPE_CHECKING:
    _class_method_only = classmethod
else:

    class _class_method_only(classmethod):
        """A class method that makes a new object, which a call on an object of the class would drop."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return super().__get__(instance, owner)
            name, method = type(instance).__name__, self.__name__

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise ModelError(
                    f"{method} makes a new object and leaves this one as it is: write model = {name}.{method}(...), "
                    "or model.load_state_dict(...) for weights into this one"
                )

            return refuse


class _HasHyperparameters:
    """``save_hyperparameters``, ``hparams`` and ``load_from_checkpoint`` for modules and data modules."""

    _hyperparameter_prefix = ""
    """Of the names under which checkpoints have them: a data module's lie beside the module's."""

    @property
    def hparams(self) -> Hyperparameters:
        """The saved constructor arguments."""
        found = self.__dict__.get("_hparams")
        if found is None:
            found = self.__dict__["_hparams"] = Hyperparameters()
        return found

    def save_hyperparameters(self, *names: Any, ignore: str | Iterable[str] = (), logger: bool = True) -> None:
        """Keep the arguments of ``__init__``; they are put into checkpoints and rebuild the object from one.

        Called inside ``__init__``, as its first lines.

        Args:
            names: arguments to keep, all when empty; or one mapping or namespace to keep instead.
            ignore: arguments to leave out, such as modules.
            logger: whether the loggers get them too.
        """
        if not isinstance(logger, bool):
            raise ConfigurationError(f"'logger' must be a bool (got {logger!r})")
        self.__dict__["_log_hyperparams"] = logger
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if len(names) == 1 and not isinstance(names[0], str):
            whole = names[0]
            values = whole if isinstance(whole, Mapping) else getattr(whole, "__dict__", None)
            if values is None:
                raise ValueError(f"'names' must be names of arguments, or one mapping or namespace (got {whole!r})")
            self.hparams.update({key: value for key, value in values.items() if key not in ignored})
            given = inspect.getargvalues(caller).locals if caller is not None else {}
            self.__dict__["_hparams_name"] = next((name for name, value in given.items() if value is whole), None)
            return
        collected: dict[str, Any] = {}
        while caller is not None and caller.f_code.co_name == "__init__" and _holds(caller, self):
            collected.update(_frame_arguments(caller, self))  # outer frames are the more derived classes
            caller = caller.f_back
        for name in names:
            if not isinstance(name, str) or name not in collected:
                raise ValueError(
                    f"'names' must be arguments of {type(self).__name__}.__init__, which has "
                    f"{', '.join(collected) or 'none'} (got {name!r})"
                )
        keep = set(names) or set(collected)
        self.hparams.update({key: value for key, value in collected.items() if key in keep and key not in ignored})

    @_class_method_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        *,
        map_location: Any = "cpu",
        strict: bool = True,
        weights_only: bool = True,
        checkpoint_io: Any = None,
        **arguments: Any,
    ) -> Self:
        """A new object from a checkpoint: constructor arguments from it, overridden by ``arguments``; then its state.

        ``checkpoint_io`` is the one that wrote it, where that was not a ``TorchCheckpointIO``. Paths, Enums,
        dataclasses, OmegaConf's containers and the like come back as what they were.

        Raises:
            ConfigurationError: an argument of this method outside its domain.
            FileNotFoundError, CheckpointError: see ``TorchCheckpointIO.load_checkpoint``.
            CheckpointMismatchError: the arguments or the weights don't fit the class, or an argument was an object,
                which no checkpoint holds, and is not among ``arguments``.
        """
        from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
        from torchhal.checkpoint._trainer_format import check_format

        check_path("checkpoint_path", checkpoint_path)
        check_bool("strict", strict)
        check_bool("weights_only", weights_only)
        if checkpoint_io is not None and not isinstance(checkpoint_io, CheckpointIO):
            raise ConfigurationError(
                f"'checkpoint_io' must be a CheckpointIO, the object that wrote the file, or None (got "
                f"{checkpoint_io!r})"
            )
        io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        checkpoint = io.load_checkpoint(checkpoint_path, map_location=map_location, weights_only=weights_only)
        check_format(checkpoint, str(checkpoint_path))
        saved = cls._saved_arguments(checkpoint, checkpoint_path, arguments)
        accepted = inspect.signature(cls.__init__).parameters
        whole: Any = checkpoint.get(f"{cls._hyperparameter_prefix}hparams_name")
        if isinstance(whole, str) and whole in accepted:  # they were given in one argument, so they go back into it
            saved = {whole: Hyperparameters(saved)}
        elif not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
            saved = {name: value for name, value in saved.items() if name in accepted}
        names = ", ".join(name for name in saved if name not in arguments) or "none"
        with _mismatch(
            lambda error: (
                f"{cls.__name__} can't be built from {str(checkpoint_path)!r}: its __init__ raised "
                f"{type(error).__name__}: {error}. Arguments from the file: {names}. Pass what it lacks, or has "
                "otherwise, as arguments here, or call save_hyperparameters() in __init__ and save anew"
            )
        ):
            loaded = cls(**{**saved, **arguments})
        loaded._restore(checkpoint, str(checkpoint_path), strict=strict)
        return loaded

    @classmethod
    def _saved_arguments(cls, checkpoint: dict[str, Any], path: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The saved ones that are not ``given``."""
        from torchhal._hyperparameters import from_plain

        prefix = cls._hyperparameter_prefix
        accepted = inspect.signature(cls.__init__).parameters.values()
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
        names = {parameter.name for parameter in accepted}
        for field in ("hparams_left_out", "hyper_parameters"):
            found = checkpoint.get(f"{prefix}{field}")
            if found is not None and not (isinstance(found, Mapping) and all(isinstance(name, str) for name in found)):
                raise CheckpointCorruptError(
                    f"{str(path)!r} is damaged: its field '{prefix}{field}' must be a dict from names to values (got "
                    f"{reprlib.repr(found)})"
                )
        objects = checkpoint.get(f"{prefix}hparams_left_out") or {}
        if asked := [name for name in objects if name not in given and (any_name or name in names)]:
            listing = ", ".join(f"{name}=... (a {objects[name]})" for name in asked)
            raise CheckpointMismatchError(
                f"{cls.__name__} can't be built from {str(path)!r} alone: it was made with objects, which no "
                f"checkpoint holds. Pass {listing}"
            )
        saved = {}
        for name, value in (checkpoint.get(f"{prefix}hyper_parameters") or {}).items():
            if name in given:
                continue
            try:
                saved[name] = from_plain(value)
            except (ValueError, TypeError, RecursionError) as error:
                raise CheckpointMismatchError(
                    f"{cls.__name__} can't be built from {str(path)!r}: its hyperparameter {name!r}: {error}. Pass "
                    f"{name}=..."
                ) from error
        return saved

    def _restore(self, checkpoint: dict[str, Any], path: str, *, strict: bool) -> None:
        raise NotImplementedError


def _holds(frame: Any, owner: Any) -> bool:
    # ``in`` would ask arrays whether they are equal
    return any(value is owner for value in frame.f_locals.values())


def _frame_arguments(frame: Any, owner: Any) -> dict[str, Any]:
    info = inspect.getargvalues(frame)
    arguments = {name: info.locals[name] for name in info.args if info.locals.get(name) is not owner}
    if info.keywords:
        arguments.update(info.locals[info.keywords])
    return arguments


def _weak(trainer: Any) -> Callable[[], Any]:
    """``trainer`` for whom it holds: with a strong reference back, both would stay until a garbage collection."""
    try:
        return weakref.ref(trainer)
    except TypeError:  # None, or a stand-in
        return lambda: trainer


def _trainer_of(owner: Any) -> Any:
    reference = owner.__dict__.get("_trainer")
    return None if reference is None else reference()


class ModuleHooks:
    """Every hook of a model, each with an empty body; the Trainer calls those that a model overrides."""

    def prepare_data(self) -> None:
        """On local rank 0 of each node, before anything else: download, unpack."""

    def setup(self, stage: str) -> None:
        """On every rank, before the model is moved; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """On every rank, at the very end."""

    def configure_model(self) -> None:
        """On every rank, under the strategy's ``init_context``: build large layers here."""

    def configure_callbacks(self) -> Any:
        """Callbacks of the model's own; they replace those of the same type."""
        return []

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Before each training batch; -1 ends the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Put the model back; the default restores each submodule's mode."""

    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()  # type: ignore[attr-defined]

    def on_predict_model_train(self) -> None: ...
    def on_before_zero_grad(self, optimizer: Any) -> None: ...
    def on_before_backward(self, loss: torch.Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch of a type that only the model knows."""
        from torchhal.pytree import move_to_device

        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward of the (scaled) loss."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """One step; forward and backward run inside ``optimizer_closure``."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clear the gradients before the first backward of a step."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; ``metric`` is the monitored value, None without one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip; override for another way, called before each optimizer step."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain data to what is saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read it back, before the weights are loaded."""


class Module(_HasHyperparameters, ModuleHooks, nn.Module):
    """An ``nn.Module`` that knows its Trainer.

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
        trainer: Trainer | None = _trainer_of(self)
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
        self.__dict__["_trainer"] = _weak(trainer)

    # -- where and when --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        tensor: torch.Tensor | None = next(self.parameters(), None)
        if tensor is None:
            tensor = next(self.buffers(), None)
        if tensor is not None:
            return tensor.device
        trainer = _trainer_of(self)
        return trainer.strategy.root_device if trainer is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        for parameter in self.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
        return torch.get_default_dtype()

    @property
    def current_epoch(self) -> int:
        trainer = _trainer_of(self)
        return 0 if trainer is None else trainer.current_epoch

    @property
    def global_step(self) -> int:
        trainer = _trainer_of(self)
        return 0 if trainer is None else trainer.global_step

    @property
    def global_rank(self) -> int:
        trainer = _trainer_of(self)
        return 0 if trainer is None else trainer.global_rank

    @property
    def local_rank(self) -> int:
        trainer = _trainer_of(self)
        return 0 if trainer is None else trainer.local_rank

    @property
    def logger(self) -> Any:
        trainer = _trainer_of(self)
        return None if trainer is None else trainer.logger

    @property
    def loggers(self) -> list[Any]:
        trainer = _trainer_of(self)
        return [] if trainer is None else trainer.loggers

    def print(self, *values: Any, **kwargs: Any) -> None:
        """``print`` on rank 0, beside the progress bar."""
        trainer = _trainer_of(self)
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
            name: the key in ``callback_metrics`` and the loggers.
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
        trainer = _trainer_of(self)
        if trainer is None:
            self._warn_unlogged([name])
            return
        trainer.results.log(
            name, value, trainer.current_hook, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist,
            add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
        )  # fmt: skip

    def log_dict(self, metrics: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """:meth:`log` for each item of ``metrics``."""
        if _trainer_of(self) is None:
            self._warn_unlogged(metrics)
            return
        if not hasattr(metrics, "items"):  # torchmetrics' MetricCollection is no Mapping
            raise TypeError(
                f"'metrics' of self.log_dict must map names to values (got {metrics!r}); use self.log for one value"
            )
        for name, value in metrics.items():
            self.log(name, value, *args, **options)

    def _warn_unlogged(self, names: Iterable[str]) -> None:
        """For a model that is used on its own; Python shows it once for each line that logs."""
        warnings.warn(
            f"{', '.join(map(repr, names))} of {type(self).__name__} goes nowhere: self.log needs a Trainer, which a "
            "model has from fit, validate, test or predict on, as long as that Trainer is there",
            UserWarning,
            stacklevel=3,
        )

    # -- manual optimization ---------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of several, whose ``step`` goes through precision and strategy.

        Args:
            use_pl_optimizer: False gives torch's own objects.
        """
        wrapped = self.trainer.wrapped_optimizers if use_pl_optimizer else self.trainer.optimizers
        return wrapped[0] if len(wrapped) == 1 else list(wrapped)

    def lr_schedulers(self) -> Any:
        """None, the scheduler, or the list of several."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Instead of ``loss.backward()``: scaled as the precision wants, averaged over the ranks."""
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
        """Only this optimizer's parameters require gradients, until :meth:`untoggle_optimizer`."""
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
        """Every tensor of ``data`` gathered from all ranks, with a new first dimension of the world's size."""
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
        with _mismatch(lambda error: f"{path!r}: the weights don't belong to {type(self).__name__}: {error}"):
            check_dtypes(checkpoint["state_dict"], self, path)
            self.load_state_dict(checkpoint["state_dict"], strict=strict)


class DataModule(_HasHyperparameters):
    """Data as an object: what loads it, prepares it and hands out the loaders.

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
        return _trainer_of(self)

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.__dict__["_trainer"] = _weak(trainer)

    def prepare_data(self) -> None:
        """On local rank 0 of each node: download, unpack. Sets no state."""

    def setup(self, stage: str) -> None:
        """On every rank; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """On every rank, at the end."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data to save with a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read it back: after ``setup``, before the first loader is made, in whatever begins with a checkpoint."""

    def _restore(self, checkpoint: dict[str, Any], path: str, *, strict: bool) -> None:
        name = type(self).__qualname__
        state = checkpoint.get(name, {})
        if not isinstance(state, dict):
            raise CheckpointCorruptError(f"{path!r} is damaged: its field {name!r} must be a dict (got {state!r:.80})")
        with _mismatch(
            lambda error: (
                f"{path!r}: {name}.load_state_dict raised {type(error).__name__} for the field {name!r}: {error}"
            )
        ):
            self.load_state_dict(state)
