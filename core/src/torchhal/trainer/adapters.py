"""Let models, data modules and callbacks that were written for another framework run under a Trainer.

A distribution names in its metadata the packages whose classes it adapts, and the adapter::

    [project.entry-points."torchhal.adapt"]
    acme = "acme"            # package of the base classes = alias of the model adapter

    [project.entry-points.torchhal]
    acme = "torchhal_acme._plugin"   # whose torchhal_model_adapters() returns Component("acme", "torchhal_acme:Acme")

It is imported when a Trainer is given an object one of whose classes, or base classes, comes from such a package.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchhal._overrides import declares_hooks, implements
from torchhal._saved_hyperparameters import HasHyperparameters
from torchhal.lazy_names import lazy_names
from torchhal.resolve import Request
from torchhal.trainer._run_data import reload_data
from torchhal.trainer._run_part import RunPart
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal.trainer.data._compound import CompoundLoader
from torchhal.trainer.data._loaders import is_loader
from torchhal.trainer.run_state import RunState

__all__ = [
    "CompoundLoader",
    "HasHyperparameters",
    "ModelAdapter",
    "Request",
    "RunState",
    "declares_hooks",
    "implements",
    "is_loader",
    "reload_data",
    "run_of",
]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__, __dir__ = lazy_names(__name__, {}, renamed={"Run": "RunState"})


class ModelAdapter(RunPart[RunState]):
    """Gives the objects of one framework what they expect of a Trainer. A Trainer has one object of each class.

    The constructor marks the framework's base classes with :func:`declares_hooks`, so that hooks, steps and loaders
    that they merely name count as missing.

    Args:
        run: state of the Trainer.
    """

    exhausts_samplers: bool = True
    """Whether a loop reaches the end of a loader's sampler, as ``for batch in loader`` does, or counts its batches.

    A sampler with a generator of its own draws once more at its end, so the order of the next epoch depends on it."""

    validates_when_stopped: bool = False
    """Whether a fit that ends inside of an epoch, as it was asked to or is out of time, validates once more."""

    @property
    def trainer(self) -> Any:
        """What the framework's objects get for the Trainer: as ``module.trainer``, and as the argument of hooks."""
        return self.run.trainer

    def adapt_request(self, request: Request) -> Request:
        """Return the Trainer's hardware arguments with torchhal's in place of the framework's own objects.

        Called when a Trainer is made with one of them as accelerator, strategy or precision, or in ``plugins``.

        Args:
            request: the arguments as the user wrote them.

        Raises:
            ConfigurationError: one of the objects has no counterpart; the message says what to write instead.
        """
        return request

    def prepare_model(self, model: Any) -> None:
        """Prepare a model of the framework, before the Trainer looks at it for the first time.

        Args:
            model: as it was given to fit, validate, test or predict.
        """

    def begin_run(self) -> None:
        """Begin a run, in each process of it, before ``setup`` of callbacks, data module and module."""

    def adapt_loaders(self, stage: str, loaders: Any) -> Any:
        """Return the loaders of a stage in a form that a Trainer takes.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
            loaders: an argument of fit or an evaluation, or what a loader's hook returned; a data module isn't one.

        Returns:
            To train on, one iterable of batches, such as a :class:`CompoundLoader`; else one, or a list.
        """
        return loaders

    def set_training_mode(self, model: Any) -> None:
        """Put a model of the framework into training mode, before the first epoch; by default all of its modules.

        Args:
            model: one of the framework's.
        """
        model.train()

    def end_run(self) -> None:
        """End a run that has begun, after errors too."""

    def follow_hook(self, name: str | None) -> None:
        """Take note of the hook or step that begins, in each process; None where none runs any more.

        Args:
            name: such as ``"training_step"``.
        """

    def kind_of_callback(self, callback: Any) -> str | None:
        """Return what a callback of the framework stands in for: then the Trainer's own is not added.

        Args:
            callback: one of the framework's.

        Returns:
            ``"checkpoint"``, ``"early_stopping"``, ``"progress_bar"`` or ``"model_summary"``; the first two are called
            after the model's hooks at the end of an epoch. None for any other.
        """
        return None

    def savers(self) -> list[ModelCheckpoint]:
        """Return what saves a run that a signal stops, and finds the last checkpoint, beside the framework's callbacks.

        They are no callbacks of the Trainer: the adapter calls their ``setup`` when a run begins, and ``teardown`` when
        it ends.
        """
        return []

    @property
    def logs_by_batch(self) -> bool:
        """Whether ``log_every_n_steps`` counts batches rather than optimizer steps."""
        return False

    def logged_step(self) -> int:
        """Return the step at which loggers record what they get now: by default the optimizer steps done."""
        steps: int = self.run.global_step
        return steps

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return the object by which a model of the framework steps an optimizer.

        Args:
            optimizer: with the methods ``step(closure)`` and ``zero_grad()`` and the attribute ``optimizer``, torch's.
        """
        return optimizer

    def adapt_checkpoint(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
        """Return a checkpoint in torchhal's format, on every rank, of one that the framework's own trainer has written.

        Args:
            checkpoint: as it was loaded for a run of one of the framework's models; torchhal's own has a
                ``"torchhal_format"``.
            path: where it was, for messages.

        Raises:
            CheckpointCorruptError: the framework's own format lacks something.
        """
        return checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the framework reads from a checkpoint of one of its models, on every rank.

        Args:
            checkpoint: of the Trainer, before the hooks of callbacks and model.
        """

    def bind_model(self, model: Any, name: str) -> Callable[..., Any]:
        """Return the hook ``name`` of a model of the framework, called with the arguments of a Trainer's."""
        body: Callable[..., Any] = getattr(model, name)
        return body

    def bind_callback(self, callback: Any, name: str) -> Callable[..., Any]:
        """Return the hook ``name`` of a callback of the framework, called with (trainer, module, ...)."""
        body: Callable[..., Any] = getattr(callback, name)

        def with_own_trainer(_: Any, *args: Any, **kwargs: Any) -> Any:
            return body(self.trainer, *args, **kwargs)

        with_own_trainer.__wrapped__ = body  # type: ignore[attr-defined]
        return with_own_trainer


def run_of(trainer: Any) -> RunState:
    """Return the state that a Trainer works on.

    Args:
        trainer: a :class:`torchhal.Trainer`.
    """
    run: RunState = trainer._run
    return run
