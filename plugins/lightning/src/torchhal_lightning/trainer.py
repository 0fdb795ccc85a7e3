"""Give torchhal's Trainer the signature and the attributes of Lightning's, for code that constructs one itself."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

import torchhal
from torchhal.errors import ConfigurationError
from torchhal.registry import find_known
from torchhal.resolve import Request, resolve
from torchhal.trainer.adapters import run_of
from torchhal_lightning import _trees as trees
from torchhal_lightning._barebones import check_barebones
from torchhal_lightning._carried_facade import CarriedFacade
from torchhal_lightning._default_callbacks import with_defaults
from torchhal_lightning._environment import defaults_from_variables
from torchhal_lightning._errors import raising_lightnings
from torchhal_lightning._picklable import is_picklable
from torchhal_lightning._profiling import LoopTimes, make_profiler
from torchhal_lightning._trainer_view import VIEWS, TrainerView
from torchhal_lightning._translated_parts import as_list
from torchhal_lightning.tuner import QUIET, TunedData

_PRECISIONS = {
    "16": "16-mixed",
    "32": "32-true",
    "64": "64-true",
    "bf16": "bf16-mixed",
}
"""Lightning's older words, and the newer ones."""

_STRATEGIES: dict[str, Any] = {"fsdp_cpu_offload": {"fsdp": {"cpu_offload": True}}, "xla_debug": "xla"}
"""Lightning's aliases that torchhal spells with options."""

_OWN_ALIASES = frozenset({
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload", "deepspeed_stage_3",
    "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme", "fsdp", "single_tpu", "single_xla", "xla",
})  # fmt: skip
"""Aliases that plugins of torchhal have too; core's own are known to it."""


class Trainer(TrainerView):
    """Lightning's Trainer, of which torchhal's does the work.

    The arguments are Lightning's. Those that name a part (``accelerator``, ``strategy``, ``precision``, ``plugins``)
    take torchhal's aliases and objects, too. Modules and callbacks have this object as their Trainer.

    Raises:
        ConfigurationError: an argument that has no counterpart, or one outside its domain. It is Lightning's
            MisconfigurationException, too, as are those of the other methods.
    """

    tree: ClassVar[str | None] = None
    """The class tree whose callbacks and loggers are the default ones; None: of the first that is imported."""

    @defaults_from_variables
    @raising_lightnings
    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: Any = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if model_registry is not None:
            raise ConfigurationError(f"'model_registry' has no counterpart here (got {model_registry!r}): leave it out")
        if barebones:
            check_barebones(self._arguments)
            logger, log_every_n_steps, num_sanity_val_steps = False, 0, 0
            enable_checkpointing = enable_progress_bar = enable_model_summary = False
        root = os.path.expanduser(os.fspath(default_root_dir)) if default_root_dir is not None else os.getcwd()
        chosen = with_defaults(
            as_list(callbacks), self.tree, checkpoint=enable_checkpointing, progress_bar=enable_progress_bar,
            summary=enable_model_summary,
        )  # fmt: skip
        parts = as_list(plugins)
        layers = [each for each in parts if isinstance(each, trees.classes("plugins.LayerSync"))]
        trainer = torchhal.Trainer(
            accelerator=accelerator,
            strategy=self._strategy_of(strategy),
            devices=devices,
            num_nodes=num_nodes,
            precision=_precision(precision, accelerator),
            plugins=[each for each in parts if each not in layers],
            logger=self._loggers(logger, root),
            callbacks=chosen,
            fast_dev_run=fast_dev_run,
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            min_steps=min_steps,
            max_time=max_time,
            limit_train_batches=_whole(limit_train_batches),
            limit_val_batches=_whole(limit_val_batches),
            limit_test_batches=_whole(limit_test_batches),
            limit_predict_batches=_whole(limit_predict_batches),
            overfit_batches=_whole(overfit_batches),
            val_check_interval=_whole(val_check_interval),
            check_val_every_n_epoch=check_val_every_n_epoch,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            enable_checkpointing=False if enable_checkpointing is False else None,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            deterministic=deterministic,
            benchmark=benchmark,
            inference_mode=inference_mode,
            use_distributed_sampler=use_distributed_sampler,
            detect_anomaly=detect_anomaly,
            sync_batchnorm=sync_batchnorm or bool(layers),
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs,
            default_root_dir=root,
        )
        if fast_dev_run and logger is not False:  # a model may use the logger's experiment
            trainer.loggers = [trees.dummy_logger(self.tree)]
        self.trainer = trainer
        """torchhal's."""
        super().__init__(run_of(trainer))
        self.barebones = barebones
        self.profiler = make_profiler(profiler, self.tree)
        if profiler is not None:
            trainer.callbacks.insert(0, LoopTimes(self.profiler))
        self.enable_autolog_hparams = enable_autolog_hparams
        trainer.facade = CarriedFacade(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a Trainer of its own with copies of the parts, before this one has trained or evaluated.

        Raises:
            TypeError: it is copied by itself, and has.
        """
        if self._run.state.fn is not None:
            return super().__deepcopy__(memo)
        made: Trainer = object.__new__(type(self))
        memo[id(self)] = made
        return made._made_of(*copy.deepcopy(self._parts(), memo))

    def __reduce__(self) -> Any:
        if self._run.state.fn is not None:
            return super().__reduce__()
        trainer, attributes = self._parts()
        cls = next(each for each in type(self).__mro__ if is_picklable(each))
        return _unpickled, (cls, trainer, {**attributes, "tree": self.tree})

    def _parts(self) -> tuple[torchhal.Trainer, dict[str, Any]]:
        """Return torchhal's Trainer and the attributes that are no views of it."""
        return self.trainer, {name: value for name, value in vars(self).items() if name not in (*VIEWS, "trainer")}

    def _made_of(self, trainer: torchhal.Trainer, attributes: dict[str, Any]) -> Trainer:
        TrainerView.__init__(self, run_of(trainer))
        vars(self).update(attributes, trainer=trainer)
        trainer.facade = CarriedFacade(self)
        return self

    # -- what the Tuner leaves -------------------------------------------------------------------------------

    tuned: TunedData | None = None
    """The data of the batch size that a Tuner has found, until this Trainer has its own."""

    @property
    def _data(self) -> Any:
        return self.tuned if self.tuned is not None and self._run.state.fn is None else super()

    @property
    def train_dataloader(self) -> Any:
        return self._data.train_dataloader

    @property
    def val_dataloaders(self) -> Any:
        return self._data.val_dataloaders

    @property
    def datamodule(self) -> Any:
        return self._data.datamodule

    @property
    def max_epochs(self) -> int | None:
        """As given; once a call has begun, the number that holds."""
        undecided = self._arguments["max_epochs"] is None and self._run.state.fn is None
        return None if undecided else self._run.max_epochs

    def _strategy_of(self, strategy: Any) -> Any:
        """Return what an alias of Lightning's stands for, one that was registered there too."""
        if not isinstance(strategy, str) or find_known("strategy", strategy) is not None:
            return strategy
        lightnings = trees.first(self.tree).strategies.StrategyRegistry
        if strategy in _STRATEGIES or strategy in _OWN_ALIASES or strategy not in lightnings:
            return _STRATEGIES.get(strategy, strategy)
        return lightnings.get(strategy)

    def trial(self, **options: Any) -> Trainer:
        """Return a Trainer with this one's arguments that writes and shows nothing, such as a Tuner runs.

        Args:
            options: arguments that it has instead of this one's.
        """
        logger = trees.dummy_logger(self.tree) if self.loggers else False
        return Trainer(**{**self._arguments, **QUIET, "logger": logger, **options})

    def _loggers(self, logger: Any, root: str) -> Any:
        """Return the loggers; None and True are Lightning's default: TensorBoard where it is installed, else CSV."""
        if logger not in (None, True):
            return list(logger) if isinstance(logger, Iterable) else logger
        loggers = trees.first(self.tree).loggers
        try:
            return loggers.TensorBoardLogger(root)
        except ModuleNotFoundError:
            return loggers.CSVLogger(root)

    def _path(self, model: Any, ckpt_path: Any) -> Any:
        """Return the checkpoint of an evaluation: the best one of the last fit, also where no model is given."""
        if ckpt_path == "best" or (ckpt_path is None and model is None):
            best = getattr(self.checkpoint_callback, "best_model_path", None)
            return best or ckpt_path
        return ckpt_path

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which a model is made with the precision's dtype.

        The strategy moves it to the device when it trains.

        Args:
            empty_init: taken and not used: parameters get their values.
        """
        return self.trainer.strategy.init_context()

    @raising_lightnings
    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train ``model``; see :meth:`torchhal.Trainer.fit`."""
        self.trainer.fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    @raising_lightnings
    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data; one dict of metrics per loader."""
        found = self.trainer.validate(model, dataloaders, self._path(model, ckpt_path), verbose, datamodule)
        return _epochs_only(found)

    @raising_lightnings
    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data; one dict of metrics per loader."""
        return _epochs_only(self.trainer.test(model, dataloaders, self._path(model, ckpt_path), verbose, datamodule))

    @raising_lightnings
    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Return what ``predict_step`` returned for each batch."""
        keep = True if return_predictions is None else return_predictions
        found = self.trainer.predict(model, dataloaders, datamodule, keep, self._path(model, ckpt_path))
        self.predict_loop.returned = found or []
        return found


def _unpickled(cls: type[Trainer], trainer: torchhal.Trainer, attributes: dict[str, Any]) -> Trainer:
    return object.__new__(cls)._made_of(trainer, attributes)


def _epochs_only(results: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out the bare name of a value that is logged both ways, which Lightning returns as ``name_epoch`` alone."""

    def is_bare(name: str, metrics: dict[str, float]) -> bool:
        bare, slash, loader = name.partition("/dataloader_idx_")
        return f"{bare}_epoch{slash}{loader}" in metrics

    return [{name: value for name, value in each.items() if not is_bare(name, each)} for each in results]


def _whole(limit: Any) -> Any:
    """Return a number of batches as an int also where it is a float above 1, as command lines and files make it."""
    return int(limit) if isinstance(limit, float) and limit > 1 and limit.is_integer() else limit


def _precision(precision: Any, accelerator: Any) -> Any:
    """Return torchhal's word for a precision; on a CPU bfloat16 for float16, as Lightning does with a warning."""
    if not isinstance(precision, str | int):
        return precision
    word = _PRECISIONS.get(str(precision), str(precision))
    if word != "16-mixed" or not _is_cpu(accelerator):
        return word
    warnings.warn("precision='16-mixed' is 'bf16-mixed' on a CPU", stacklevel=3)
    return "bf16-mixed"


def _is_cpu(accelerator: Any) -> bool:
    if accelerator == "auto":
        return resolve(Request()).accelerator.alias == "cpu"
    return accelerator == "cpu" or type(accelerator).__name__ == "CPUAccelerator"
