"""Train, validate, test and predict: the Trainer takes the user's arguments and starts runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from torchhal import _arguments as arguments
from torchhal import registry
from torchhal._overrides import implements
from torchhal._text_table import format_table
from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.composition import Composable
from torchhal.distributed.rendezvous import expect
from torchhal.errors import ModelError
from torchhal.precision import Precision
from torchhal.registry._hints import ATTRIBUTES
from torchhal.resolve import Request, check_fit, composition_of, resolve
from torchhal.strategies import Strategy
from torchhal.strategies._fused_optimizers import fuse
from torchhal.trainer import _checkpointing as checkpointing
from torchhal.trainer import _trained_by as trained_by
from torchhal.trainer._auto_strategy import AutoStrategy
from torchhal.trainer._configure_optimizers import SchedulerConfig, configure_optimizers
from torchhal.trainer._connectors import check_can_fit, check_model, make_callbacks, make_loggers
from torchhal.trainer._hook_names import check_hook_names, check_strategy_hooks
from torchhal.trainer._launch import launch
from torchhal.trainer._properties import TrainerProperties
from torchhal.trainer._settings import RunSettings, Setting
from torchhal.trainer._trial import keep_unused
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks import Callback
from torchhal.trainer.data._loaders import as_loaders, check_loader, check_one_loader
from torchhal.trainer.data._sources import DataSources, check_datamodule, check_no_second, find_source
from torchhal.trainer.loggers import Logger
from torchhal.trainer.loops._evaluation_loop import EvaluationLoop
from torchhal.trainer.loops._fit_loop import FitLoop
from torchhal.trainer.profilers import Profiler
from torchhal.trainer.run_state import RunState

_log = logging.getLogger("torchhal")

# Command lines try the members of a union in their order: a dict of options before a class, a plain string last.
AliasOptions = Mapping[str, Mapping[str, Any]]
"""One alias with its options, ``{"zero3": {"cpu_offload": True}}``."""

PluginPart = (
    AliasOptions
    | Precision
    | CheckpointIO
    | ClusterEnvironment
    | type[Precision | CheckpointIO | ClusterEnvironment]
    | str
)
"""One of ``Trainer(plugins=[...])``."""


class _RemovedMethod:
    """A class method that other trainers had, and that is named in ``ATTRIBUTES``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}: {ATTRIBUTES[self.name]}")


class Trainer(TrainerProperties):
    """Trains, validates, tests and predicts with a model, on the hardware its arguments name.

    Args:
        accelerator: alias, class or object of an accelerator, or "auto".
        strategy: alias, class or object of a strategy, or "auto": the cheapest with which a step of fit fits into
            memory.
        devices: a count, -1 for all, indices ([0, 2] or "0,2"), or "auto".
        num_nodes: machines that take part; "auto": as many as the launcher has started processes on.
        precision: alias ("32-true", "bf16-mixed", ...) or object.
        plugins: precision, checkpoint IO and cluster environment, as objects or aliases.
        batch_size: "auto": the largest power of two of samples in each of the training loader's batches, and at least
            as many as it has, with which a step fits into memory; the learning rate stays as it is. None: the loader's.
        logger: True (or None) for CSV files, False, or a logger, an alias ("tensorboard"), an alias with options
            ({"csv": {"name": "mine"}}), or several of these.
        callbacks: a callback, an alias ("ema"), an alias with options, or several of these.
        default_root_dir: where runs are kept; the working directory when None.
        max_epochs: end training after so many epochs; -1 is no limit. 1000 where neither ``max_steps`` nor ``max_time``
            is given.
        min_epochs: train at least so many epochs, whatever asks to stop earlier.
        max_steps: end training after so many optimizer steps; -1 is no limit.
        min_steps: take at least so many optimizer steps, whatever asks to stop earlier.
        max_time: end training after this time: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.
        limit_train_batches: train on so many batches of each epoch (an int) or on this share of them (a float).
        limit_val_batches: the same for validation.
        limit_test_batches: the same for tests.
        limit_predict_batches: the same for predictions.
        overfit_batches: train on so many batches, unshuffled, and validate on the same ones.
        fast_dev_run: run so many batches (True: one) of everything, and keep nothing.
        val_check_interval: validate every so many batches, after a share of the epoch, or as soon as so much time has
            passed since the last one (as in ``max_time``; rank 0's clock decides for all).
        check_val_every_n_epoch: validate in every n-th epoch; None: ``val_check_interval`` counts across epochs.
        num_sanity_val_steps: validation batches before training, to find errors early; -1 for all.
        accumulate_grad_batches: batches per optimizer step.
        gradient_clip_val: clip gradients to this norm or value; not at all for None and 0.
        gradient_clip_algorithm: "norm" (also for None): the norm of all gradients together; "value": each element.
        log_every_n_steps: how often step values go to the loggers.
        enable_checkpointing: add a ModelCheckpoint where ``callbacks`` has none. With False one in ``callbacks`` is an
            error.
        enable_progress_bar: add a progress bar where ``callbacks`` has none.
        enable_model_summary: print the model's layers and the number of its parameters when a fit begins.
        use_distributed_sampler: share the loaders out over the ranks. Training repeats some samples so that every
            rank has as many; evaluation sees each once.
        sync_batchnorm: let batch norms compute over the batches of all ranks when they train, on any device.
        reload_dataloaders_every_n_epochs: get a new training loader so often; 0 is never.
        inference_mode: evaluate under ``torch.inference_mode`` rather than ``no_grad``; not inside of a fit, where
            tensors of a validation may be trained with.
        deterministic: True: only deterministic algorithms; "warn": warn where there is none.
        benchmark: torch's search for the fastest kernels, where the device has one.
        detect_anomaly: stop at a loss that is not finite and trace the origin of bad gradients; slow.
        profiler: "simple" for a table of where the time of fit goes, "torch" for a Chrome trace per rank as well, or
            an object of :mod:`torchhal.trainer.profilers`. None costs nothing.

    Raises:
        ConfigurationError: an argument outside its domain, or parts that don't fit, before any process starts.
        UnknownArgumentError: an argument that other trainers have; the message gives its name here.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a setting as an attribute of the class, which the constructor's arguments would never reach."""
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if isinstance(vars(RunSettings).get(name), Setting):
                raise TypeError(
                    f"{cls.__name__} can't have the setting {name!r} as an attribute of the class: give it to "
                    f"super().__init__({name}=...)"
                )

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "a copy of a Trainer would share its run: make a new Trainer, or copy.deepcopy one before its fit"
        )

    @explain_unknown_arguments
    def __init__(
        self,
        *,
        accelerator: AliasOptions | Accelerator | type[Accelerator] | str = "auto",
        strategy: AliasOptions | Strategy | type[Strategy] | str = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int | str = 1,
        precision: AliasOptions | Precision | type[Precision] | int | str | None = None,
        plugins: Sequence[PluginPart] | PluginPart | None = None,
        batch_size: str | None = None,
        logger: bool | AliasOptions | Logger | Sequence[AliasOptions | Logger | str] | str | None = True,
        callbacks: AliasOptions | Callback | Sequence[AliasOptions | Callback | str] | str | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | Mapping[str, float] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        fast_dev_run: int | bool = False,
        val_check_interval: int | float | str | timedelta | Mapping[str, float] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = True,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = True,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        inference_mode: bool = True,
        deterministic: bool | str | None = False,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        profiler: Profiler | str | None = None,
    ) -> None:
        self.fast_dev_run = fast_dev_run
        self._set_limits(max_epochs, min_epochs, max_steps, min_steps, max_time)
        self.limit_train_batches = limit_train_batches
        self.limit_val_batches = limit_val_batches
        self.limit_test_batches = limit_test_batches
        self.limit_predict_batches = limit_predict_batches
        self.overfit_batches = overfit_batches
        self.val_check_interval = val_check_interval
        self.check_val_every_n_epoch = check_val_every_n_epoch
        arguments.check_validation(self.val_check_interval, self.check_val_every_n_epoch)
        self.num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.use_distributed_sampler = use_distributed_sampler
        self.sync_batchnorm = sync_batchnorm
        self.inference_mode = inference_mode
        self.detect_anomaly = detect_anomaly
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.default_root_dir = default_root_dir
        self.profiler = profiler
        enable_checkpointing = arguments.check_bool_or_default("enable_checkpointing", enable_checkpointing, True)
        enable_progress_bar = arguments.check_bool_or_default("enable_progress_bar", enable_progress_bar, True)
        enable_model_summary = arguments.check_bool_or_default("enable_model_summary", enable_model_summary, True)
        self.enable_checkpointing = enable_checkpointing
        if self.fast_dev_run:
            self._shorten()
            logger = False

        request = Request(accelerator, strategy, devices, num_nodes, precision, () if plugins is None else plugins)
        request = self._run.adapters.adapt_request(request)
        plan = resolve(request, on_environment_chosen=expect)
        self._run.compose(plan)
        finds_batch_size = arguments.check_batch_size(batch_size)
        if request.is_auto_strategy or finds_batch_size:
            self._run.auto = AutoStrategy(request, finds_batch_size)
        if self.sync_batchnorm:
            self.strategy.check_sync_batchnorm(plan.world_size)

        self.evaluation_loop = EvaluationLoop(self._run)
        self.fit_loop = FitLoop(self._run, self.evaluation_loop)
        defaults, notes = registry.defaults()
        self.loggers = make_loggers(
            logger,
            self.default_root_dir,
            [entry for entry in defaults if entry.kind == "default_logger"],
            notes=notes,
        )
        self.callbacks = make_callbacks(
            callbacks,
            self._run.adapters,
            defaults=[entry for entry in defaults if entry.kind == "default_callback"],
            notes=notes,
            checkpointing=None if self.fast_dev_run else enable_checkpointing,
            progress_bar=enable_progress_bar,
            model_summary=enable_model_summary,
            fast_dev_run=bool(self.fast_dev_run),
        )
        _log.debug("plan:\n%s", plan.describe())
        composition = composition_of(self.strategy, plan.world_size)
        for kind, parts in (("logger", self.loggers), ("callback", self.callbacks)):
            for part in parts:
                if isinstance(part, Composable):
                    check_fit(kind, part, composition)
        for note in (*plan.notes, *notes):
            self.warn_once(note)

    if not TYPE_CHECKING:  # a type checker would accept every name
        add_argparse_args = _RemovedMethod()
        from_argparse_args = _RemovedMethod()
        parse_argparser = _RemovedMethod()

        def __getattr__(self, name: str) -> Any:
            if name == "_run":  # made at the first use: a subclass may set attributes before super().__init__()
                run = vars(self)["_run"] = RunState()
                run.trainer = self
                return run
            if hasattr(type(self), name):  # a property raised AttributeError, and Python has dropped it
                return object.__getattribute__(self, name)
            advice = f": {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{advice}", name=name, obj=self
            )

    def _set_limits(self, max_epochs: Any, min_epochs: Any, max_steps: Any, min_steps: Any, max_time: Any) -> None:
        self.max_time = max_time
        self.max_epochs, self.min_epochs = max_epochs, min_epochs
        self.max_steps, self.min_steps = max_steps, min_steps
        arguments.check_order("min_epochs", self.min_epochs, "max_epochs", self.max_epochs)
        arguments.check_order("min_steps", self.min_steps, "max_steps", self.max_steps)
        if self.max_epochs is None:
            unlimited = self.max_steps != -1 or self.max_time is not None
            self.max_epochs = -1 if unlimited else max(1000, self.min_epochs or 0)

    def _shorten(self) -> None:
        """``fast_dev_run``: a few batches of everything."""
        count = self.fast_dev_run
        self.limit_train_batches = self.limit_val_batches = count
        self.limit_test_batches = self.limit_predict_batches = count
        self.max_epochs, self.min_epochs = 1, None
        self.max_steps, self.min_steps = count, None
        self.num_sanity_val_steps = 0
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
        self.overfit_batches = 0.0

    # -- entry points ----------------------------------------------------------------------------------------

    @explain_unknown_arguments
    def fit(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train ``model``.

        Args:
            model: an ``nn.Module`` with ``training_step`` and ``configure_optimizers``.
            train_dataloaders: one iterable of batches; or a data module in this place.
            val_dataloaders: one loader or several.
            datamodule: gives the loaders instead.
            ckpt_path: continue from a checkpoint: a path, or "last" for the newest complete one.

        Raises:
            ModelError: the model or its data lack something.
            RankFailedError: a process failed; the message starts with its traceback.
        """
        self._prepare(model)
        check_can_fit(self._run, check_model(model))
        if hasattr(train_dataloaders, "train_dataloader"):
            check_no_second(datamodule, "train_dataloaders", train_dataloaders)
            train_dataloaders, datamodule = None, train_dataloaders
        check_no_second(datamodule, "train_dataloaders", train_dataloaders)
        check_no_second(datamodule, "val_dataloaders", val_dataloaders)
        check_datamodule(datamodule)
        adapters = self._run.adapters
        train_dataloaders = adapters.adapt_loaders(model, "train", train_dataloaders)
        val_dataloaders = adapters.adapt_loaders(model, "validate", val_dataloaders)
        if train_dataloaders is not None:
            check_one_loader(train_dataloaders)
        for loader in as_loaders(val_dataloaders):
            check_loader(loader, "val_dataloaders")
        sources = DataSources(train=train_dataloaders, validate=val_dataloaders)
        if find_source(model, datamodule, "train", train_dataloaders) is None:
            raise ModelError(
                "fit needs training data: pass train_dataloaders or a datamodule, or define train_dataloader on the "
                "model"
            )
        self.should_stop = False
        self._launch("fit", model, sources, datamodule, ckpt_path)

    @explain_unknown_arguments
    def validate(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data; one dict of metrics per loader.

        Args:
            model: as for :meth:`fit`; None: the one of the last call.
            dataloaders: one loader or several; or a data module in this place.
            ckpt_path: evaluate a checkpoint: a path, "best" or "last"; None: the model as it is.
            verbose: print the metrics.
            datamodule: gives the loaders instead.
        """
        sources = DataSources(validate=dataloaders)
        result: list[dict[str, float]] = self._evaluate("validate", model, sources, datamodule, ckpt_path, verbose)
        return result

    @explain_unknown_arguments
    def test(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data; one dict of metrics per loader.

        Args:
            model: as for :meth:`fit`; None: the one of the last call.
            dataloaders: one loader or several; or a data module in this place.
            ckpt_path: evaluate a checkpoint: a path, "best" or "last"; None: the model as it is.
            verbose: print the metrics.
            datamodule: gives the loaders instead.
        """
        sources = DataSources(test=dataloaders)
        result: list[dict[str, float]] = self._evaluate("test", model, sources, datamodule, ckpt_path, verbose)
        return result

    @explain_unknown_arguments
    def predict(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool = True,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> list[Any] | None:
        """Return what ``predict_step`` returned for each batch, in the order of the dataset, from all ranks.

        A list of lists with several loaders.

        Args:
            model: as for :meth:`fit`; None: the one of the last call.
            dataloaders: one loader or several; or a data module in this place.
            datamodule: gives the loaders instead.
            return_predictions: False keeps nothing, for callbacks that write.
            ckpt_path: predict with a checkpoint: a path, "best" or "last"; None: the model as it is.
        """
        keep = arguments.check_bool("return_predictions", return_predictions)
        sources = DataSources(predict=dataloaders, keep_predictions=keep)
        result: list[Any] | None = self._evaluate("predict", model, sources, datamodule, ckpt_path, False)
        return result

    def _prepare(self, model: Any) -> None:
        """Let the framework that ``model`` was written for prepare it."""
        if (adapter := self._run.adapters.of(model)) is not None:
            adapter.prepare_model(model)

    def _evaluate(
        self, fn: str, model: Any, sources: DataSources, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> Any:
        arguments.check_bool("verbose", verbose)
        model = self.module if model is None else check_model(model)
        self._prepare(model)
        if model is None:
            raise ModelError(f"{fn} needs a model: pass one, or fit one with this Trainer first")
        given = getattr(sources, fn)
        if given is not None and hasattr(given, "setup") and hasattr(given, "prepare_data"):
            check_no_second(datamodule, "dataloaders", given)
            given, datamodule = None, given
        check_no_second(datamodule, "dataloaders", given)
        check_datamodule(datamodule)
        given = self._run.adapters.adapt_loaders(model, fn, given)
        setattr(sources, fn, given)
        for loader in as_loaders(given):
            check_loader(loader, "dataloaders")
        if datamodule is None and given is None and model is self.module:
            datamodule = self.datamodule
        if find_source(model, datamodule, fn, given) is None:
            raise ModelError(f"{fn} needs data: pass dataloaders or a datamodule, or define the loader on the model")
        step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[fn]
        if not implements(model, step):
            raise ModelError(f"{type(model).__name__} has no {step}: define it to {fn}")
        results = self._launch(fn, model, sources, datamodule, ckpt_path)
        if verbose and self.is_global_zero and results:
            self.print_results(fn, results)
        return results

    def _launch(self, fn: str, model: Any, sources: DataSources, datamodule: Any, ckpt_path: Any) -> Any:
        path = arguments.check_ckpt_path(ckpt_path)
        run = self._run
        said = check_hook_names(model, datamodule, run.callbacks, is_adapted=run.adapters.adapts)
        for sentence in (*said, *check_strategy_hooks(run.strategy)):
            run.warn_once(sentence)
        if run.sources.callbacks_asked_of is model:
            sources.callbacks_asked_of = model
        keep_unused(run)
        run.module, run.datamodule, run.sources = model, datamodule, sources
        return launch(run, self.fit_loop, fn, path)

    # -- for the strategy ------------------------------------------------------------------------------------

    def configure_optimizers(self) -> tuple[list[Any], list[SchedulerConfig]]:
        """Return the model's optimizers and schedulers; called by the strategy when its parameters are in place."""
        run = self._run
        run.follow_module()
        optimizers, configs = configure_optimizers(run.module)
        if not optimizers:
            run.warn_once(f"{type(run.module).__name__}.configure_optimizers returned None: nothing is optimized")
        if run.fuses_optimizers:
            fuse(optimizers)
        run.trained_by = trained_by.describe(optimizers, configs, run.module)
        for callback in run.callbacks:
            if isinstance(callback, Callback):
                callback._look_at_optimizers(self, run.module, optimizers)
        return optimizers, configs

    # -- loggers ---------------------------------------------------------------------------------------------

    def call_loggers(self, method: str, *args: Any) -> None:
        """Call a method of every logger on rank 0, as the Trainer does: one that fails is named once in a warning.

        Args:
            method: its name; a logger without it is left out.
            *args: its arguments.

        Raises:
            Exception: that of a logger whose ``on_error`` is ``"raise"``.

        .. versionadded:: 0.2
        """
        self._run.call_loggers(method, *args)

    def call_logger(self, logger: Any, method: str, *args: Any) -> None:
        """Call a method of one logger on this rank, as :meth:`call_loggers`.

        .. versionadded:: 0.2
        """
        self._run.call_logger(logger, method, *args)

    # -- messages --------------------------------------------------------------------------------------------

    def print(self, *values: Any, **kwargs: Any) -> None:
        """``print`` on rank 0, above the progress bar."""
        self._run.print(*values, **kwargs)

    def announce(self, line: str) -> None:
        """Show a line about the run, on rank 0; see :meth:`.RunOutput.announce`."""
        self._run.announce(line)

    def warn_once(self, message: str) -> None:
        """Warn on rank 0, once per ``message``."""
        self._run.warn_once(message)

    def print_results(self, fn: str, results: list[dict[str, float]]) -> None:
        """Print the metrics of a validation or test, one table per loader."""
        for index, metrics in enumerate(results):
            head = fn if len(results) == 1 else f"{fn} (loader {index})"
            rows = format_table([(name, f"{value:.6g}") for name, value in metrics.items()])
            self.print("\n".join([head, *(f"  {row}" for row in rows)]))

    # -- checkpoints -----------------------------------------------------------------------------------------

    @explain_unknown_arguments
    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Write the run as it is between two batches. Every rank must call.

        Raises:
            CheckpointError: on every rank, when it could not be written; an older file of that name is intact.
            ConfigurationError: an argument outside its domain.
        """
        path = arguments.check_path("filepath", filepath)
        arguments.check_bool("weights_only", weights_only)
        storage_options = arguments.check_storage_options(storage_options)
        if self.module is None or self.strategy.module is None:
            raise ModelError("save_checkpoint needs a model: fit, validate, test or predict first")
        if self._run.trained_elsewhere and not weights_only and not self.strategy.is_set_up:
            raise ModelError(
                "this process did not train, its workers did, and their optimizers are gone: save with a "
                "ModelCheckpoint during the fit, or with weights_only=True"
            )
        strategy = self.strategy
        after_the_run = not strategy.is_set_up
        if after_the_run:  # the process group is gone: set it up again, to gather the state
            strategy.setup_environment()
        try:
            checkpoint = checkpointing.dump_checkpoint(self._run, weights_only=weights_only)
            strategy.save_checkpoint(checkpoint, path, storage_options=storage_options)
        finally:
            if after_the_run:
                strategy.teardown()

    def _save_alone(self, path: str) -> None:
        """Write the run as this rank has it, without the other ranks, which may hang or be gone."""
        io = self.strategy.checkpoint_io
        io.save_checkpoint(checkpointing.dump_checkpoint(self._run, alone=True), path)
        io.wait()
