"""Adapt LightningModules, LightningDataModules and Lightning's callbacks to torchhal's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchhal
from torchhal.errors import ModelError
from torchhal.trainer.adapters import ModelAdapter, Request, RunState, declares_hooks, implements
from torchhal.trainer.callbacks import PredictionWriter
from torchhal_lightning import _trees as trees
from torchhal_lightning._carried_facade import CarriedFacade
from torchhal_lightning._combined_loaders import begin_once, combined, draw_as_iterators
from torchhal_lightning._dataloader_iter import draws_batches, fed
from torchhal_lightning._finders import Finders
from torchhal_lightning._lightning_checkpoints import VERSION, from_lightning, is_lightnings
from torchhal_lightning._logging import Log
from torchhal_lightning._loop_views import batches_that_stepped
from torchhal_lightning._predictions import PredictLoopView
from torchhal_lightning._profiling import Profiling
from torchhal_lightning._savers import SaverBeside
from torchhal_lightning._strategy_view import StrategyView
from torchhal_lightning._trainer_view import TrainerView
from torchhal_lightning._translated_parts import translated

_BASES = ("LightningModule", "LightningDataModule", "Callback")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_WITH_BODY = ("predict_step", "on_validation_model_zero_grad")
"""Methods of LightningModule that work where a subclass has none."""
_KINDS = {
    "checkpoint": "callbacks.Checkpoint",
    "early_stopping": "callbacks.EarlyStopping",
    "progress_bar": "callbacks.ProgressBar",
    "model_summary": "callbacks.ModelSummary",
}


class LightningAdapter(ModelAdapter):
    """Modules, data modules, callbacks and loggers of ``lightning.pytorch`` and ``pytorch_lightning``.

    Args:
        run: state of the Trainer.
    """

    exhausts_samplers = False
    validates_when_stopped = True

    def __init__(self, run: RunState) -> None:
        super().__init__(run)
        self._view: TrainerView | None = None
        self._attributes: dict[str, Any] | None = None
        """Those of the module that runs."""
        self._logging: list[Any] = []
        """The module and the callbacks that have a ``log`` of this run."""
        self._finders = Finders(run)
        self._savers: list[SaverBeside] = []
        self._profiling: Profiling | None = None
        self._trained_on: Any = ()
        """The loaders of a fit."""
        self._wrapped: list[tuple[str, Any]] = []
        """Methods that the module has in this run, with those that it had itself."""
        self._silent: list[tuple[Any, Any]] = []
        """Owners of hyperparameters that are not logged, and whether they would be."""
        self._declare()

    def _declare(self) -> None:
        for name in _BASES:
            for base in trees.classes(name):
                for cls in base.__mro__:
                    if trees.has(cls):
                        declares_hooks(cls, but=_WITH_BODY)

    @property
    def trainer(self) -> TrainerView:
        if self._view is None:
            carried = getattr(self.run.trainer, "facade", None)
            facade = carried.of(self.run) if isinstance(carried, CarriedFacade) else None
            self._view = facade or TrainerView(self.run)
        return self._view

    def adapt_request(self, request: Request) -> Request:
        return translated(request)

    def prepare_model(self, model: Any) -> None:
        self._declare()  # the other tree may have been imported since

    def begin_run(self) -> None:
        self._declare()
        self.trainer.predict_loop = PredictLoopView(self.run)
        self._finders.begin()
        for saver in self.savers():
            saver.setup(self.run.trainer, self.run.module, self.run.state.fn or "fit")
        profiler = self.trainer.profiler
        if not isinstance(profiler, (type(None), *trees.classes("profilers.PassThroughProfiler"))):
            self._profiling = Profiling(self.run, profiler)
            self._profiling.begin(self.trainer.log_dir)
        if not self.trainer.enable_autolog_hparams:
            for owner in filter(None, (self.run.module, self.run.datamodule)):
                self._silent.append((owner, getattr(owner, "_log_hyperparams", True)))
                owner._log_hyperparams = False
        module = self.run.module
        if trees.root_of(module) is None:
            return
        self._check_hyperparameters()
        self._attributes = vars(module)
        for name in _STEPS:
            step = getattr(module, name, None)
            if step is not None and draws_batches(step):
                self._wrap(name, fed(step, f"{type(module).__name__}.{name}"))
        if self.run.state.fn == "fit" and implements(module, "on_validation_model_zero_grad"):
            self._wrap("on_validation_model_eval", self._after_zero_grad(module))
        if any(type(module).log is vars(base)["log"] for base in trees.classes("LightningModule")):
            self._attributes["log"] = Log(module, self.run)
            self._logging.append(module)
        for callback in self.run.callbacks:
            if trees.root_of(callback) is not None:
                callback.log, callback.log_dict = module.log, module.log_dict
                self._logging.append(callback)

    def _check_hyperparameters(self) -> None:
        """Raise ModelError where the loggers would get one name with two values, of the module and the data module."""
        owners = [each for each in (self.run.module, self.run.datamodule) if getattr(each, "_log_hyperparams", False)]
        first, second = ([dict(each.hparams_initial) for each in owners] + [{}, {}])[:2]
        differ = [name for name in first.keys() & second.keys() if not _same(first[name], second[name])]
        if differ and self.run.loggers:
            raise ModelError(
                f"the hyperparameters {', '.join(map(repr, sorted(differ)))} have other values in the model than in "
                "the data module: rename them in one, or leave them out with save_hyperparameters(..., logger=False)"
            )

    def _wrap(self, name: str, body: Callable[..., Any]) -> None:
        """Give the module another method of that name in this run."""
        assert self._attributes is not None
        self._wrapped.append((name, self._attributes.get(name)))
        self._attributes[name] = body

    def _after_zero_grad(self, module: Any) -> Callable[[], None]:
        """Return a module's ``on_validation_model_eval``, before which a fit's validation calls another hook."""
        set_eval = module.on_validation_model_eval

        def call() -> None:
            run, progress = self.run, self.run.progress
            stepped = run.trainer.is_last_batch or progress.batches_done % progress.accumulate == 0
            if run.state.stage != "sanity_check" and stepped:
                module.on_validation_model_zero_grad()
            set_eval()

        return call

    def adapt_loaders(self, stage: str, loaders: Any) -> Any:
        adapted = combined(stage, loaders)
        if stage == "train":
            if self.run.progress.total_batches:  # loaded anew, of which Lightning makes one iterator more
                draw_as_iterators(adapted)
            self._trained_on = adapted
        return adapted

    def set_training_mode(self, model: Any) -> None:
        """Leave each module in the mode that it has, as Lightning does since 2.2: a frozen one may be in the other."""
        if self.run.is_global_zero:
            for logger in self.run.loggers:
                if hasattr(logger, "log_graph"):
                    logger.log_graph(model)
        begin_once(self._trained_on)

    def end_run(self) -> None:
        self._unwrap()
        self._finders.end()
        profiling, self._profiling = self._profiling, None
        try:
            for saver in self._savers:
                saver.teardown(self.run.trainer, self.run.module, self.run.state.fn or "fit")
        finally:
            if profiling is not None:
                profiling.end()

    def _unwrap(self) -> None:
        """Give the module, the data module and the callbacks back what was theirs."""
        while self._wrapped:
            name, own = self._wrapped.pop()
            if own is None:
                vars(self.run.module).pop(name, None)
            else:
                vars(self.run.module)[name] = own
        while self._silent:
            owner, logged = self._silent.pop()
            owner._log_hyperparams = logged
        while self._logging:
            owner = self._logging.pop()
            vars(owner).pop("log", None)
            if owner is not self.run.module:
                vars(owner).pop("log_dict", None)
        self._attributes = None
        self._trained_on = ()
        self.trainer.predict_loop = PredictLoopView(self.run)  # without what was predicted

    def follow_hook(self, name: str | None) -> None:
        if self._attributes is not None:
            self._attributes["_current_fx_name"] = name

    def kind_of_callback(self, callback: Any) -> str | None:
        return next((kind for kind, path in _KINDS.items() if isinstance(callback, trees.classes(path))), None)

    def bind_model(self, model: Any, name: str) -> Callable[..., Any]:
        body = super().bind_model(model, name)
        if name == "on_train_batch_end":
            body = self._with_outputs_of_lightning(body, 0)
        return self._timed(body, model, name)

    def bind_callback(self, callback: Any, name: str) -> Callable[..., Any]:
        own: Callable[..., Any] = getattr(callback, name)
        if own.__module__.partition(".")[0] == "torchhal":  # of a callback of torchhal's that passes for Lightning's
            return own
        body = super().bind_callback(callback, name)
        if name == "teardown" and isinstance(callback, trees.classes("callbacks.OnExceptionCheckpoint")):
            return self._unless_failed(body)  # which would remove what it has saved
        if name == "on_train_batch_end":
            body = self._with_outputs_of_lightning(body, 2)
        elif name == "on_predict_batch_end" and _reads_the_loop(callback):
            interval: Any = vars(callback)["interval"]
            body = self._noting_predictions(body, keep=interval.on_epoch)
        return self._timed(body, callback, name)

    def _timed(self, body: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
        if self._profiling is None:
            return body
        kind = type(owner).__name__
        if owner is self.run.module:
            return self._profiling.timed(body, f"[LightningModule]{kind}.{name}")
        if isinstance(owner, trees.classes("LightningDataModule")):
            return self._profiling.timed(body, f"[LightningDataModule]{kind}.{name}")
        return self._profiling.timed(body, f"[Callback]{getattr(owner, 'state_key', kind)}.{name}")

    def _with_outputs_of_lightning(self, hook: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Return ``hook``, called with the dict that Lightning makes of what ``training_step`` returned.

        Its loss is divided by the number of batches of an optimizer step.
        """
        run = self.run

        def call(*args: Any) -> Any:
            output = args[position]
            if isinstance(output, torch.Tensor):
                output = {"loss": output}
            if output is None:
                output = {}
            elif run.progress.accumulate > 1 and isinstance(output, dict) and "loss" in output:
                output = {**output, "loss": output["loss"] / run.progress.accumulate}
            return hook(*args[:position], output, *args[position + 1 :])

        call.__wrapped__ = hook  # type: ignore[attr-defined]
        return call

    def _unless_failed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``hook``, called where the run has ended well: where Lightning calls it."""

        def call(*args: Any) -> Any:
            return None if self.run.state.status == "interrupted" else hook(*args)

        return call

    def _noting_predictions(self, hook: Callable[..., Any], *, keep: bool) -> Callable[..., Any]:
        """Return the hook of a prediction writer, which reads from the loop what was predicted."""

        def call(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.trainer.predict_loop.note(outputs, batch_idx, dataloader_idx, keep=keep)
            return hook(trainer, module, outputs, batch, batch_idx, dataloader_idx)

        return call

    def savers(self) -> list[torchhal.ModelCheckpoint]:
        """Return one for each ModelCheckpoint of Lightning's, unless the run has one of torchhal's."""
        run = self.run
        if run.fast_dev_run or any(isinstance(each, torchhal.ModelCheckpoint) for each in run.callbacks):
            return []
        theirs = [each for each in run.callbacks if isinstance(each, trees.classes("callbacks.ModelCheckpoint"))]
        if [saver.theirs for saver in self._savers] != theirs:
            self._savers = [SaverBeside(each, run) for each in theirs]
        for saver in self._savers:
            saver.follow()
        return list(self._savers)

    @property
    def logs_by_batch(self) -> bool:
        return not getattr(self.run.module, "automatic_optimization", True)

    def logged_step(self) -> int:
        """Return the number of the batch in a fit, from 0; after it how many there were."""
        stepped = batches_that_stepped(self.run)
        return stepped - 1 if stepped and self.run.state.fn == "fit" else stepped

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return an object that passes for Lightning's wrapper, and for the optimizer."""
        lightning_optimizer = trees.first(trees.root_of(self.run.module)).core.optimizer.LightningOptimizer
        kind = type(optimizer)
        torchs = type(optimizer.optimizer)
        own = {"optimizer": None, "__repr__": lambda self: f"Lightning{self.optimizer!r}"}
        cls = type(f"Lightning{torchs.__name__}", (kind, lightning_optimizer, torchs), own)
        wrapped: Any = object.__new__(cls)
        vars(wrapped).update(vars(optimizer))
        vars(wrapped).update(_strategy=StrategyView(self.run), _on_before_step=_nothing, _on_after_step=_nothing)
        return wrapped

    def adapt_checkpoint(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
        return from_lightning(checkpoint, self.run, path) if is_lightnings(checkpoint) else checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[VERSION] = trees.first(trees.root_of(self.run.module)).__version__


def _reads_the_loop(callback: Any) -> bool:
    """Whether it is a prediction writer of Lightning's own, not of torchhal's that passes for one."""
    writers = trees.classes("callbacks.BasePredictionWriter")
    return isinstance(callback, writers) and not isinstance(callback, PredictionWriter)


def _nothing() -> None: ...


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # an array's, of several values
        return False
