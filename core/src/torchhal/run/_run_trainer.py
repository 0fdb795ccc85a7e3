"""Provide the Trainer of a loop of the user's own: its components, checkpoints, signals and failures, without loops."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not
from typing import Any

from torch import nn

from torchhal.errors import CheckpointError, CheckpointMismatchError, ConfigurationError, ModelError
from torchhal.run._setup_objects import SetupObjects
from torchhal.strategies._fused_optimizers import fuse, unfuse
from torchhal.trainer import Trainer
from torchhal.trainer import _trained_by as trained_by
from torchhal.trainer._configure_optimizers import SchedulerConfig
from torchhal.trainer.callbacks import Callback, ModelCheckpoint
from torchhal.trainer.data._loaders import check_one_loader
from torchhal.trainer.data._sources import DataSources


class SaveOnCall(ModelCheckpoint):
    """A ModelCheckpoint that saves when it is asked to, and when a signal stops the run."""

    def __init__(self) -> None:
        super().__init__(every_n_epochs=0, save_on_train_epoch_end=False)
        self._has_folder = True
        """Whether its folder could be written to when the run was set up."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Choose the folder; one that can't be written to stops no loop that saves elsewhere, or never."""
        self._has_folder = True
        try:
            super().setup(trainer, module, stage)
        except (CheckpointError, ConfigurationError, OSError):  # the second is that of ranks that hear of it
            self._has_folder = False
            trainer.warn_once(
                f"{self.dirpath!r} can't be written to, so nothing is saved there when a signal stops this run: give "
                "torchhal.Run(default_root_dir=...) another folder"
            )

    def save_interrupted(self, trainer: Any) -> None:
        """Save where a signal stops the run, if its set-up hasn't told that nothing can be saved."""
        if self._has_folder:
            super().save_interrupted(trainer)

    def save(self, trainer: Any) -> str:
        """Save under the usual name in the run's folder, instead of the last one there; return the path.

        Every rank must call.
        """
        self._save(trainer, top_k=True)
        return self.best_model_path


class SavedObjects(Callback):
    """The state of the user's other objects, in the run's checkpoints."""

    state_key = "torchhal.run.SavedObjects"

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.objects.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in self.objects.items():
            if name not in state_dict:
                continue
            try:
                value.load_state_dict(state_dict[name])
            except Exception as error:
                raise CheckpointMismatchError(
                    f"{name!r}, the {type(value).__name__} that setup got, refuses its state "
                    f"({type(error).__name__}: {error})"
                ) from error

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Compare the names: a new object begins as it is, but one of another name may be meant by a saved one.

        Inference continues nothing else of the callbacks, so it loads the states here.
        """
        states = checkpoint.get("callbacks", {}).get(self.state_key, {})
        path, missing = trainer._run.ckpt_path, [name for name in self.objects if name not in states]
        unclaimed = [name for name in states if name not in self.objects]
        if missing and unclaimed:
            raise CheckpointMismatchError(
                f"{path!r} holds the state of {_listed(unclaimed)}, and setup got {_listed(missing)} instead: give the "
                f"objects the names that they had, setup(..., {unclaimed[0]}=...)"
            )
        if missing:
            trainer.warn_once(f"{path!r} has no state of {_listed(missing)}, so what setup got begins as it is")
        if trainer.state.fn != "fit":
            self.load_state_dict(states)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


class RunTrainer(Trainer):
    """A Trainer whose loops are the user's. Its settings are those of :class:`torchhal.Run`."""

    def __init__(self, **settings: Any) -> None:
        self.saver = SaveOnCall()
        self.saved_objects = SavedObjects()
        self.found: SetupObjects | None = None
        self._names: list[list[list[str]]] = []
        self._run.by_hand = True
        super().__init__(
            callbacks=[self.saver, self.saved_objects],
            max_epochs=-1,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        self.should_stop = False

    def take(self, found: SetupObjects) -> None:
        """Take the objects of a set-up, before anything starts.

        Raises:
            ConfigurationError: the strategy can't be driven by a loop of the user's own, or not with these objects.
        """
        run, strategy = self._run, self.strategy
        if strategy.needs_trainer:
            raise ConfigurationError(
                f"strategy {strategy.display_name!r} {strategy.needs_trainer}: use the Trainer, or another strategy"
            )
        if run.accumulate_grad_batches > 1 and len(found.optimizers) > 1:
            raise ConfigurationError(
                f"'accumulate_grad_batches' must be 1 with {len(found.optimizers)} optimizers, each of which steps "
                f"when the loop says so (got {run.accumulate_grad_batches})"
            )
        loader = found.loaders[0] if found.loaders else None
        if loader is not None:
            check_one_loader(loader, "loader")
        self.found = found
        self.saved_objects.objects = found.others
        run.module, run.datamodule, run.sources = found.module, None, DataSources(train=loader)
        names: dict[int, str] = {}
        for name, parameter in found.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        self._names = [
            [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
            for optimizer in found.optimizers
        ]

    def configure_optimizers(self) -> tuple[list[Any], list[SchedulerConfig]]:
        """Return the optimizers with the parameters that the strategy has put in the places of those they had."""
        found, run = self.found, self._run
        assert found is not None
        run.follow_module()
        parameters = dict(run.module.named_parameters(remove_duplicate=False))
        for optimizer, groups in zip(found.optimizers, self._names, strict=True):
            replace_parameters(optimizer, groups, parameters, self.strategy.display_name)
        if run.fuses_optimizers:
            fuse(found.optimizers)
        configs = [SchedulerConfig(scheduler=each, interval="step") for each in found.schedulers]
        run.trained_by = trained_by.describe(found.optimizers, configs, run.module)
        return list(found.optimizers), configs

    def give_back(self, goes_on: bool) -> None:
        """Forget the user's objects, and give the optimizers the parameters of the module as it is after the run.

        Args:
            goes_on: whether the program does, which may use them: a state that is lost is worth a warning.
        """
        found, self.found = self.found, None
        self.saved_objects.objects = {}
        if found is None:
            return
        if self._run.fuses_optimizers:
            unfuse(found.optimizers)
        parameters = dict(found.module.named_parameters(remove_duplicate=False))
        for optimizer, groups in zip(found.optimizers, self._names, strict=True):
            changed = False
            for group, names in zip(optimizer.param_groups, groups, strict=False):
                own = [parameters[name] for name in names if name in parameters]
                if len(own) != len(group["params"]) or any(map(is_not, own, group["params"])):
                    group["params"], changed = own, True
            if changed and optimizer.state:
                optimizer.state.clear()
                if goes_on:
                    self.warn_once(
                        f"the state of the {type(optimizer).__name__} was divided among the ranks, and has ended with "
                        "the run: to go on with it, continue from a checkpoint (ckpt_path)"
                    )


def replace_parameters(
    optimizer: Any, groups: list[list[str]], parameters: Mapping[str, nn.Parameter], strategy: str
) -> None:
    """Give each group of ``optimizer`` the parameters of these names.

    Args:
        optimizer: made over the parameters that the model had before it was set up.
        groups: the names of each group's parameters.
        parameters: of the model, by name.
        strategy: what messages call the strategy.

    Raises:
        ModelError: the optimizer has a state of parameters that are replaced.
    """
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        for index, name in enumerate(names):
            now = parameters[name]
            if now is group["params"][index]:
                continue
            if optimizer.state.get(group["params"][index]):
                raise ModelError(
                    f"the {type(optimizer).__name__} has taken steps before setup, and strategy {strategy!r} divides "
                    f"{name!r}, whose state is whole: make a new one, or continue from a checkpoint (ckpt_path)"
                )
            group["params"][index] = now
