"""Lightning's LearningRateFinder and BatchSizeFinder, whose trials run beside the run that they are callbacks of."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from torchhal import rng, tuning
from torchhal.errors import ConfigurationError
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal.trainer.adapters import RunState, reload_data
from torchhal_lightning import _trees as trees
from torchhal_lightning._hyperparameter_fields import check_field
from torchhal_lightning.tuner import (
    QUIET,
    LearningRates,
    RangeTest,
    check_no_loaders,
    find_learning_rate,
    limits_of,
    samples_of,
    search,
)

_log = logging.getLogger("torchhal")


_SETTINGS = (
    "accumulate_grad_batches", "gradient_clip_algorithm", "gradient_clip_val", "inference_mode", "max_epochs",
)  # fmt: skip
"""Arguments that a trial shares with the run."""


class Finders:
    """Gives the finders among the callbacks of a run their bodies, and takes them back.

    A trial is a run of its own, on this rank's device, of a copy of the model.

    Args:
        run: whose callbacks they are.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._given: list[tuple[Any, str]] = []

    def begin(self) -> None:
        """Take note of this run's finders."""
        for callback in self._run.callbacks:
            if isinstance(callback, trees.classes("callbacks.LearningRateFinder")):
                self._give(callback, "lr_find", self._find_learning_rate)
            elif isinstance(callback, trees.classes("callbacks.BatchSizeFinder")):
                self._give(callback, "setup", self._check_batch_size)
                self._give(callback, "scale_batch_size", self._find_batch_size)

    def _give(self, callback: Any, name: str, body: Callable[[Any, Any], None]) -> None:
        setattr(callback, name, lambda trainer, module, stage=None: body(callback, module))
        self._given.append((callback, name))

    def end(self) -> None:
        """Take the bodies back."""
        while self._given:
            callback, name = self._given.pop()
            vars(callback).pop(name, None)

    def _trial(self, **options: Any) -> Any:
        from torchhal_lightning.trainer import Trainer

        run = self._run
        settings = {name: getattr(run.trainer, name) for name in _SETTINGS}
        logger = trees.dummy_logger(trees.root_of(run.module)) if run.loggers else False
        device = run.strategy.root_device
        return Trainer(
            **settings, **QUIET, **options, accelerator=run.strategy.accelerator.name, strategy="single_device",
            devices=1 if device.index is None or device.type == "cpu" else [device.index],
            precision=run.strategy.precision.alias, logger=logger, default_root_dir=run.default_root_dir,
        )  # fmt: skip

    def _data(self, method: str) -> dict[str, Any]:
        """Return the loaders that this run was given, by the arguments of ``method``."""
        sources = self._run.sources
        if method == "fit":
            return {"train_dataloaders": sources.train, "val_dataloaders": sources.validate}
        return {"dataloaders": getattr(sources, method)}

    def _try(self, trial: Any, method: str, **more: Any) -> None:
        """Run a trial with a copy of the module; this process's random numbers stay where they were."""
        run = self._run
        if not isinstance(run.strategy, SingleDeviceStrategy | DDPStrategy):
            raise ConfigurationError(
                f"a finder's trials need a copy of the model, which strategy {run.strategy.alias!r} doesn't allow: use "
                "'ddp' or one device, or torchhal_lightning.Tuner before the fit"
            )
        numbers = rng.collect_host()
        try:
            datamodule = copy.copy(run.datamodule)
            getattr(trial, method)(copy.deepcopy(run.module), datamodule=datamodule, **more)
        finally:
            rng.restore_host(numbers)

    def _find_learning_rate(self, callback: Any, module: Any) -> None:
        run, own = self._run, vars(callback)
        rates = LearningRates(own["_mode"], own["_min_lr"], own["_max_lr"], own["_num_training_steps"])
        name = find_learning_rate(module, run.datamodule, own["_attr_name"]) if own["_update_attr"] else ""
        test = RangeTest(rates, own["_early_stop_threshold"])
        trial = self._trial(callbacks=[test], max_steps=rates.num_training, limit_val_batches=rates.num_training)
        self._try(trial, "fit", **self._data("fit"))
        rates.results = run.strategy.broadcast(rates.results)
        callback.optimal_lr = rates
        if own["_update_attr"] and (lr := rates.suggestion()) is not None:
            tuning.set_field((module, run.datamodule), name, lr)
            for optimizer in run.strategy.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
            _log.info("learning rate set to %s", lr)

    def _check_batch_size(self, callback: Any, module: Any) -> None:
        run, name = self._run, vars(callback)["_batch_arg_name"]
        assert run.state.fn is not None
        if run.world_size > 1:
            raise ConfigurationError("the batch size can't be looked for by several processes: use devices=1")
        check_no_loaders(self._data(run.state.fn).values())
        check_field(module, run.datamodule, name)

    def _find_batch_size(self, callback: Any, module: Any) -> None:
        run, own = self._run, vars(callback)
        method, name, steps = run.state.fn, own["_batch_arg_name"], own["_steps_per_trial"]
        assert method is not None
        if method != "fit" and run.state.stage != method:  # the validation of a fit
            return

        def attempt(size: int) -> int | None:
            tuning.set_field((module, run.datamodule), name, size)
            trial = self._trial(callbacks=[], max_steps=steps, limit_train_batches=1.0, **limits_of(steps))
            self._try(trial, method)
            return samples_of(trial, method)

        size = search(
            attempt, run.strategy.accelerator.is_out_of_memory, own["_init_val"], mode=own["_mode"],
            max_trials=own["_max_trials"], margin=own["_margin"], max_val=own["_max_val"],
        )  # fmt: skip
        tuning.set_field((module, run.datamodule), name, size)
        callback.optimal_batch_size = size
        reload_data(run)
