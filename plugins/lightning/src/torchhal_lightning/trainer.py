"""Give torchhal's Trainer the signature and the attributes of Lightning's, for code that constructs one itself."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

import torchhal
from torchhal.errors import ConfigurationError
from torchhal.resolve import Request, resolve
from torchhal.trainer.adapters import run_of
from torchhal_lightning import _trees as trees
from torchhal_lightning._trainer_view import TrainerView, views
from torchhal_lightning.tuner import QUIET

_PRECISIONS = {
    "16": "16-mixed",
    "32": "32-true",
    "64": "64-true",
    "bf16": "bf16-mixed",
}
"""Lightning's older words, and the newer ones."""

_STRATEGIES: dict[str, Any] = {"fsdp_cpu_offload": {"fsdp": {"cpu_offload": True}}, "xla_debug": "xla"}
"""Lightning's aliases that torchhal spells with options."""


class Trainer(TrainerView):
    """Lightning's Trainer, of which torchhal's does the work.

    The arguments are Lightning's. Those that name a part (``accelerator``, ``strategy``, ``precision``, ``plugins``)
    take torchhal's aliases and objects, too. Modules and callbacks have this object as their Trainer.

    Raises:
        ConfigurationError: an argument that isn't mapped, such as ``profiler``, or one outside its domain.
    """

    tree: ClassVar[str | None] = None
    """The class tree whose callbacks and loggers are the default ones; None: of the first that is imported."""

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
        val_check_interval: int | float | None = None,
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
        for name, value in {"profiler": profiler, "model_registry": model_registry}.items():
            if value not in (None, "passthrough"):
                raise ConfigurationError(f"{name!r} is not mapped to torchhal's Trainer (got {value!r}): leave it out")
        if barebones:
            logger = enable_checkpointing = enable_progress_bar = enable_model_summary = False
            num_sanity_val_steps = 0
        root = os.fspath(default_root_dir) if default_root_dir is not None else os.getcwd()
        chosen = list(callbacks) if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]
        if enable_checkpointing is not False and not fast_dev_run:
            chosen += self._default_checkpoint(chosen)
        parts = list(plugins) if isinstance(plugins, list | tuple) else [] if plugins is None else [plugins]
        layers = [each for each in parts if isinstance(each, trees.classes("plugins.LayerSync"))]
        trainer = torchhal.Trainer(
            accelerator=accelerator,
            strategy=_STRATEGIES.get(strategy, strategy) if isinstance(strategy, str) else strategy,
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
        self.barebones = barebones
        self.trainer = trainer
        """torchhal's."""
        super().__init__(run_of(trainer))
        views[trainer] = weakref.ref(self)

    def trial(self, **options: Any) -> Trainer:
        """Return a Trainer with this one's arguments that writes and shows nothing, such as a Tuner runs.

        Args:
            options: arguments that it has instead of this one's.
        """
        logger = trees.first(self.tree).loggers.logger.DummyLogger() if self.loggers else False
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

    def _default_checkpoint(self, callbacks: list[Any]) -> list[Any]:
        """Return Lightning's ModelCheckpoint, unless there is one that saves."""
        tree = trees.first(self.tree)
        kinds = (*trees.classes("callbacks.Checkpoint"), torchhal.ModelCheckpoint)
        return [] if any(isinstance(each, kinds) for each in callbacks) else [tree.callbacks.ModelCheckpoint()]

    def _path(self, model: Any, ckpt_path: Any) -> Any:
        """Return the checkpoint of an evaluation: the best one of the last fit, also where no model is given."""
        if ckpt_path == "best" or (ckpt_path is None and model is None):
            best = getattr(self.checkpoint_callback, "best_model_path", None)
            return best or ckpt_path
        return ckpt_path

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
        return self.trainer.validate(model, dataloaders, self._path(model, ckpt_path), verbose, datamodule)

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
        return self.trainer.test(model, dataloaders, self._path(model, ckpt_path), verbose, datamodule)

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
        return self.trainer.predict(model, dataloaders, datamodule, keep, self._path(model, ckpt_path))


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
