"""The Trainer as LightningModules, LightningDataModules and Lightning's callbacks and loggers expect it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchhal.trainer.adapters import RunState, implements
from torchhal_lightning import _trees as trees
from torchhal_lightning._combined_loaders import CombinedBatches
from torchhal_lightning._logging import LoggerConnectorView, ResultsView
from torchhal_lightning._loop_views import EvaluationLoopView, FitLoopView
from torchhal_lightning._predictions import PredictLoopView
from torchhal_lightning._strategy_view import AcceleratorView, PrecisionView, StrategyView
from torchhal_lightning._words import StateView, Word

VIEWS = frozenset({"_run", "_kept", "_logger_connector", "_results", "fit_loop", "predict_loop"})
"""Attributes of a view that show a run."""
OWN = VIEWS | {"barebones", "profiler", "enable_autolog_hparams"}
"""Attributes of a view itself."""


class TrainerView:
    """One run under Lightning's names; what isn't named here is the Trainer's own.

    Args:
        run: of the Trainer.
    """

    barebones = False
    profiler: Any = None
    enable_autolog_hparams = True

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._kept = run.trainer
        """As a module keeps its Trainer under Lightning, also when nobody else does."""
        self._results = ResultsView(run)
        self._logger_connector = LoggerConnectorView(run)
        self.fit_loop = FitLoopView(run)
        self.predict_loop = PredictLoopView(run)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_run" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._run.trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN or "_run" not in vars(self):  # a subclass may set some before it is one's view
            object.__setattr__(self, name, value)
        elif name in ("training", "validating", "testing", "predicting", "sanity_checking"):
            self._run.state.stage = _STAGES[name] if value else None
        elif name == "loggers" and value is None:
            self._run.trainer.loggers = []
        elif type(self) is TrainerView or hasattr(type(self._run.trainer), name):
            setattr(self._run.trainer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a module or of data is not a copy of the run

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the run behind in a copy of something that has it.

        Raises:
            TypeError: it is copied by itself.
        """
        if not memo:
            raise TypeError("a copy of a Trainer would share its run: make a new Trainer with its arguments")

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> StateView:
        return StateView(self._run)

    @property
    def interrupted(self) -> bool:
        """Whether the last call has ended by an error or a signal."""
        return self._run.state.status == "interrupted"

    @property
    def strategy(self) -> StrategyView:
        return StrategyView(self._run)

    @property
    def precision_plugin(self) -> PrecisionView:
        return PrecisionView(self._run)

    @property
    def accelerator(self) -> AcceleratorView:
        return AcceleratorView(self._run)

    @property
    def validate_loop(self) -> EvaluationLoopView:
        return EvaluationLoopView(self._run, "validate")

    @property
    def test_loop(self) -> EvaluationLoopView:
        return EvaluationLoopView(self._run, "test")

    @property
    def _evaluation_loop(self) -> EvaluationLoopView:
        return EvaluationLoopView(self._run, self._run.state.fn or "")

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates."""
        run = self._run
        return (
            self.fit_loop.epoch_loop.validates
            and implements(run.module, "validation_step")
            and run.limit_val_batches > 0
        )

    @property
    def _accelerator_connector(self) -> Any:
        devices = list(self._run.strategy.devices)
        return SimpleNamespace(is_distributed=self._run.world_size > 1, _parallel_devices=devices)

    @property
    def _data_connector(self) -> Any:
        """What a module asks, which of it and of the data module moves a batch."""
        owners = [each for each in (self._run.datamodule, self._run.module) if each is not None]

        def owner_of(hook: str) -> Any:
            return next((each for each in owners if implements(each, hook)), owners[-1])

        return SimpleNamespace(_datahook_selector=SimpleNamespace(get_instance=owner_of))

    @property
    def lightning_module(self) -> Any:
        return self._run.module

    @property
    def val_dataloaders(self) -> Any:
        return self._run.trainer.val_dataloaders

    @property
    def datamodule(self) -> Any:
        return self._run.trainer.datamodule

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        return self._run.trainer.num_sanity_val_batches if self._run.state.fn == "fit" else []

    @property
    def num_val_batches(self) -> list[int | float]:
        sources = self._run.sources
        data = sources.evaluation_data if self._run.state.fn == "validate" else sources.validation_data
        return _of_each(data.loaders, self._run.trainer.num_val_batches)

    @property
    def num_test_batches(self) -> list[int | float]:
        return _of_each(self._run.sources.evaluation_data.loaders, self._run.trainer.num_test_batches)

    @property
    def train_dataloader(self) -> Any:
        """The loader that was given, or the structure of several."""
        loader = self._run.trainer.train_dataloader
        return loader.structure if isinstance(loader, CombinedBatches) else loader

    # -- folders -------------------------------------------------------------------------------------------------

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger; the root folder without one."""
        run = self._run
        if not run.loggers:
            return run.default_root_dir
        logger: Any = run.loggers[0]
        kinds = (*trees.classes("loggers.TensorBoardLogger"), *trees.classes("loggers.CSVLogger"))
        if isinstance(logger, kinds):
            own: Any = logger
            return str(own.log_dir)
        found: str | None = getattr(logger, "save_dir", run.log_dir)
        return found

    # -- settings, as Lightning has them -----------------------------------------------------------------------------

    @property
    def fast_dev_run(self) -> int | bool:
        """The number of batches, and True for one."""
        batches: int = self._run.fast_dev_run
        return bool(batches) if batches <= 1 else batches

    @property
    def gradient_clip_algorithm(self) -> Word | None:
        algorithm = self._run.gradient_clip_algorithm
        return None if algorithm is None else Word(algorithm)


_STAGES = {
    "training": "train",
    "validating": "validate",
    "testing": "test",
    "predicting": "predict",
    "sanity_checking": "sanity_check",
}


def _of_each(loaders: list[Any], numbers: list[int | float]) -> list[int | float]:
    """Return the batches of each loader, also of those that are read as one."""
    found: list[int | float] = []
    for loader, number in zip(loaders, numbers, strict=True):
        found += map(len, loader.loaders) if isinstance(loader, CombinedBatches) else [number]
    return found
