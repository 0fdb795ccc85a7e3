"""Define the contract of callbacks, which run code beside the model at fixed points of a run."""

from __future__ import annotations

import functools
import hashlib
import inspect
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

from torchhal._overrides import declares_hooks
from torchhal.composition import Composable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch.optim import Optimizer

    from torchhal import Trainer


@declares_hooks
class Callback(Composable):
    """Base class of callbacks, of which only the overridden hooks are called.

    The Trainer determines once per run which hooks a callback overrides, on its class or on the instance, and calls
    only those: on every rank, in the order of ``trainer.callbacks``, with checkpoint callbacks last. For each hook
    that the model has too the callbacks come first, except those with :attr:`runs_after_module`, such as
    ``ModelCheckpoint``, and at the end of an epoch ``EarlyStopping``, so that it reads what the model logged.

    Each hook gets the Trainer that runs and, as ``module``, the user's model. A hook of an evaluation's batch that
    doesn't take ``dataloader_idx`` isn't given it. A hook that calls a collective must call it on every rank.

    The hooks of an epoch, a batch or a step leave the batch, the outputs, ``module.training`` and the random numbers of
    torch, numpy and Python as they are: draw from a generator of your own. Each object, and each copy of one, has a
    state of its own; launchers send a callback to other processes by pickle, with its state.
    """

    runs_after_module: bool = False
    """True to call its hooks after the model's of the same name.

    ``setup``, ``teardown``, ``on_save_checkpoint`` and ``on_load_checkpoint`` are called before the model's even so. A
    callback that saves the run needs True: then the changes that the model's own hook makes are part of the state."""

    replaces: str = ""
    """Which of the callbacks that a Trainer adds by itself this one stands in for: ``"progress_bar"``,
    ``"model_summary"``, ``"checkpoint"``, or "" for none.

    .. versionadded:: 0.2
    """

    _made_with: str = ""
    """The arguments of ``__init__``, as text or as a digest, which distinguish callbacks of one ``state_key``."""

    _trainer_id: str = ""
    """The Trainer that this object last fitted with."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(cls.__dict__.get("__init__")):
            cls.__init__ = _records_arguments(cls.__init__)  # type: ignore[method-assign]

    # -- a run ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        """Prepare for ``fit``, ``validate``, ``test`` or ``predict``, before anything else of it, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        """Clean up after everything of the call, also after an error, on every rank.

        Hooks that were registered at the model are removed, and signals handled as before.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            stage: as in :meth:`setup`.
        """

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """Called when fit begins, on every rank.

        Ranks can communicate from here on, and the checkpoint that the run continues from is loaded.
        """

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        """Called when fit has ended without an error, on every rank."""

    def on_sanity_check_start(self, trainer: Trainer, module: Any) -> None:
        """Called before the few validation batches that run ahead of training, on every rank."""

    def on_sanity_check_end(self, trainer: Trainer, module: Any) -> None:
        """Called after the sanity check, on every rank; the values that it logged are dropped afterwards."""

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        """Called on each rank where the run ends by ``exception``; other ranks may have ended, so don't communicate."""

    # -- training --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Called before the first epoch, after a checkpoint was loaded, on every rank."""

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        """Called after the last epoch, on every rank."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Called before each training epoch, on every rank."""

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """Called after each training epoch and its validation, on every rank.

        The values of the epoch are in ``trainer.callback_metrics``.
        """

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Called before each training batch, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in the epoch, from 0.
        """

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each training batch, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            outputs: what ``training_step`` returned, without the graph.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in the epoch, from 0.
        """

    # -- evaluation --------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        """Called before each validation, on every rank; in a sanity check too, when ``trainer.sanity_checking``."""

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        """Called after each validation, on every rank, with its values in ``trainer.callback_metrics``."""

    def on_validation_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Called before the first batch of a validation, on every rank."""

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """Called after the last batch of a validation, on every rank; values logged here still count."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in its dataloader, from 0.
            dataloader_idx: the number of the dataloader, from 0.
        """

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each validation batch, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            outputs: what ``validation_step`` returned.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in its dataloader, from 0.
            dataloader_idx: the number of the dataloader, from 0.
        """

    def on_test_start(self, trainer: Trainer, module: Any) -> None:
        """Called before a test, on every rank."""

    def on_test_end(self, trainer: Trainer, module: Any) -> None:
        """Called after a test, on every rank, with its values in ``trainer.callback_metrics``."""

    def on_test_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Called before the first batch of a test, on every rank."""

    def on_test_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """Called after the last batch of a test, on every rank; values logged here still count."""

    def on_test_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each test batch, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in its dataloader, from 0.
            dataloader_idx: the number of the dataloader, from 0.
        """

    def on_test_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each test batch, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            outputs: what ``test_step`` returned.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in its dataloader, from 0.
            dataloader_idx: the number of the dataloader, from 0.
        """

    def on_predict_start(self, trainer: Trainer, module: Any) -> None:
        """Called before a prediction, on every rank."""

    def on_predict_end(self, trainer: Trainer, module: Any) -> None:
        """Called after a prediction, on every rank."""

    def on_predict_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Called before the first batch of a prediction, on every rank."""

    def on_predict_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """Called after the last batch of a prediction, on every rank."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each batch to predict, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in its dataloader, from 0.
            dataloader_idx: the number of the dataloader, from 0.
        """

    def on_predict_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each batch to predict, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            outputs: what ``predict_step`` returned.
            batch: the batch of this rank, on its device.
            batch_idx: the number of the batch in its dataloader, from 0.
            dataloader_idx: the number of the dataloader, from 0.
        """

    # -- inside a training step --------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, module: Any, loss: torch.Tensor) -> None:
        """Called before each ``loss.backward()``, on every rank.

        Who keeps ``loss`` keeps its graph: detach it.
        """

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        """Called after each backward, on every rank, with the gradients accumulated so far, not yet clipped."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        """Called before each optimizer step, on every rank, after unscaling and before clipping."""

    def on_before_zero_grad(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        """Called before the gradients of ``optimizer`` are set to None, on every rank."""

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Called while a checkpoint is put together, on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            checkpoint: the checkpoint, to which plain data may be added.
        """

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was read for resuming, before anything of it is restored, on every rank.

        It may be of a run without this callback: begin anew then, or raise CheckpointMismatchError.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            checkpoint: the checkpoint.
        """

    @property
    def state_key(self) -> str:
        """The name under which :meth:`state_dict` is saved: the same for each object made alike, and no other class's.

        Where several callbacks of a Trainer have the same, the arguments that their ``__init__`` got and that are not
        their defaults are added (of long ones a digest), and after that a number, by their order. Of an argument that
        is no number, string, list, tuple or dict only the class counts. A dataclass has no ``__init__`` of its own, so
        its objects are numbered.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data. Called on every rank; the state of rank 0 is saved.

        Numbers, texts and lists in public attributes that grow with training are part of it. Return lists and dicts
        that don't change when training goes on, and change nothing: a state may be taken at any time, and often.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. Called on every rank before training starts.

        Leave what is given as it is, then and later: the same may be loaded again.
        """

    def _reset_state(self) -> None:
        """Reset what belongs to one run. Called before a fit, if the previous one was another Trainer's."""

    def _look_at_model(self, trainer: Trainer, module: Any) -> None:
        """Look at the model of a fit while it is whole and as its author built it: no strategy has taken it yet.

        Called on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
        """

    def _look_at_optimizers(self, trainer: Trainer, module: Any, optimizers: Sequence[Optimizer]) -> None:
        """Look at what ``configure_optimizers`` returned, before the strategy takes it. Called on every rank.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            optimizers: over its parameters.
        """

    def _restore_optimizers(self, trainer: Trainer, module: Any, state: Mapping[str, Any] | None) -> None:
        """Give the optimizers and schedulers of this fit the groups, or the classes, that they had got while training.

        Called on every rank at the beginning of each fit: the strategy has made them, and nothing of a checkpoint is
        loaded into them, nor this callback's state.

        Args:
            trainer: the Trainer that runs.
            module: the user's model.
            state: what :meth:`state_dict` returned for the checkpoint that is continued; None without one.
        """

    def _generate_state_key(self, **settings: Any) -> str:
        """Return a state key that distinguishes callbacks of one class with different ``settings``."""
        return f"{type(self).__qualname__}{settings!r}"


_MAX_WORDS = 80
"""Characters of arguments that a key in a checkpoint spells out; longer ones are replaced by a digest."""

_MAX_PIECES = 10_000
"""Values and brackets of the arguments that count, so that only the beginning of a list of millions does."""


def _records_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``init`` so that it stores its arguments as text in ``_made_with``."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def initialize(self: Callback, *args: Any, **kwargs: Any) -> None:
        if "_made_with" not in self.__dict__:  # set already where a derived class's calls this one
            self.__dict__["_made_with"] = _in_words(signature, (self, *args), kwargs)
        init(self, *args, **kwargs)

    return initialize


def _in_words(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the arguments that are not their defaults as text, or as a digest where that is long."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the constructor raises it too, with a better message
        return ""
    named = sorted(list(bound.items())[1:])  # without self
    named = [(name, value) for name, value in named if not _same_words(value, signature.parameters[name].default)]
    pieces = chain.from_iterable(_pieces(value, f", {name}=") for name, value in named)
    words = "".join(islice(pieces, _MAX_PIECES)).removeprefix(", ")
    return words if len(words) <= _MAX_WORDS else hashlib.sha256(words.encode(errors="replace")).hexdigest()[:16]


def _same_words(one: Any, other: Any) -> bool:
    """Return whether two values have the same text, as an argument that is left at its default."""
    if other is inspect.Parameter.empty:
        return False
    pairs = islice(zip_longest(_pieces(one), _pieces(other)), _MAX_PIECES)
    return all(first == second for first, second in pairs)


def _pieces(value: Any, before: str = "") -> Iterator[str]:
    """Yield the text of a value in pieces, the same in every process; of an object only the name of its class."""
    if value is None or isinstance(value, bool | int | float | str):
        yield before + repr(value)
    elif isinstance(value, list | tuple):
        yield f"{before}["
        for index, item in enumerate(value):
            yield from _pieces(item, ", " if index else "")
        yield "]"
    elif isinstance(value, dict):
        yield f"{before}{{"
        for index, (key, item) in enumerate(value.items()):
            yield from _pieces(key, ", " if index else "")
            yield from _pieces(item, ": ")
        yield "}"
    else:
        yield before + type(value).__qualname__


__all__ = ["Callback"]
