"""The callback contract: code that runs beside the model at fixed points of a run."""

from __future__ import annotations

import functools
import hashlib
import inspect
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch.optim import Optimizer

    from torchhal import Trainer


class Callback:
    """Base class of callbacks; override what you need, nothing else is called.

    The Trainer looks once per run which hooks a callback overrides, on its class or on the instance, and calls
    only those: on every rank, in the order of ``trainer.callbacks``, with checkpoint callbacks last. For each hook
    that the model has too the callbacks come first, except those with :attr:`runs_after_module`, such as
    ``ModelCheckpoint``, and at the end of an epoch ``EarlyStopping``, so that it sees what the model logged.

    ``module`` is the user's model. A hook of an evaluation's batch that doesn't take ``dataloader_idx`` isn't given it.
    What a hook communicates it must communicate on every rank.
    """

    runs_after_module: bool = False
    """Whether its hooks are called after the model's of the same name (but for ``setup``, ``teardown``,
    ``on_save_checkpoint`` and ``on_load_checkpoint``). A callback that saves the run wants True: what the model's own
    hook does is part of the state then."""

    _made_with: str = ""
    """The arguments of ``__init__``, in words or as a digest, which tell callbacks of one ``state_key`` apart."""

    _trainer_id: str = ""
    """The Trainer that this object last fitted with."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(cls.__dict__.get("__init__")):
            cls.__init__ = _records_arguments(cls.__init__)  # type: ignore[method-assign]

    # -- a run ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        """Before everything of ``fit``, ``validate``, ``test`` or ``predict`` (``stage``), on every rank."""

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        """After everything, also after an error."""

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """When fit begins: ranks can communicate, and what the run continues from is loaded."""

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        """When fit has ended without an error."""

    def on_sanity_check_start(self, trainer: Trainer, module: Any) -> None:
        """Before the few validation batches that run ahead of training."""

    def on_sanity_check_end(self, trainer: Trainer, module: Any) -> None:
        """After them; what they logged is about to be forgotten."""

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        """On a rank where the run ends by ``exception``; other ranks may be gone, so don't communicate."""

    # -- training --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Before the first epoch, after a checkpoint was loaded."""

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Before each epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """After each epoch and its validation, with the epoch's values in ``trainer.callback_metrics``."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Before each training batch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After each training batch; ``outputs`` is what ``training_step`` returned, without the graph."""

    # -- evaluation --------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        """Before each validation, the sanity check's too (``trainer.sanity_checking``)."""

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        """After each validation, with its values in ``trainer.callback_metrics``."""

    def on_validation_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Before the first batch of a validation."""

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """After the last batch of a validation; values logged here still count."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After each validation batch; ``outputs`` is what ``validation_step`` returned."""

    def on_test_start(self, trainer: Trainer, module: Any) -> None:
        """Before a test."""

    def on_test_end(self, trainer: Trainer, module: Any) -> None:
        """After a test, with its values in ``trainer.callback_metrics``."""

    def on_test_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Before the first batch of a test."""

    def on_test_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """After the last batch of a test; values logged here still count."""

    def on_test_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After each test batch; ``outputs`` is what ``test_step`` returned."""

    def on_predict_start(self, trainer: Trainer, module: Any) -> None:
        """Before a prediction."""

    def on_predict_end(self, trainer: Trainer, module: Any) -> None:
        """After a prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, module: Any) -> None:
        """Before the first batch of a prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """After the last batch of a prediction."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before each batch to predict."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After each batch; ``outputs`` is what ``predict_step`` returned."""

    # -- inside a training step --------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, module: Any, loss: torch.Tensor) -> None:
        """Before each ``loss.backward()``."""

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        """After each backward, with the gradients accumulated so far, not yet clipped."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        """Before each optimizer step, after unscaling and before clipping."""

    def on_before_zero_grad(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        """Before gradients are set to None."""

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """While a checkpoint is put together, on every rank; ``checkpoint`` may be added to."""

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """After a checkpoint was read for resuming, before anything of it is restored."""

    @property
    def state_key(self) -> str:
        """The name under which :meth:`state_dict` is saved.

        Where several callbacks of a Trainer have the same, the arguments that their ``__init__`` got and that are not
        their defaults are added (of long ones a digest), and after that a number, by their order. Of an argument that
        is no number, string, list, tuple or dict only the class counts. A dataclass has no ``__init__`` of its own, so
        its objects are numbered.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain data; called on every rank, rank 0's is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; called on every rank before training starts."""

    def _reset_state(self) -> None:
        """Forget what belongs to one run; called before a fit, where the last one was another Trainer's."""

    def _generate_state_key(self, **settings: Any) -> str:
        """A state key that tells callbacks of one class with different ``settings`` apart."""
        return f"{type(self).__qualname__}{settings!r}"


_MAX_WORDS = 80
"""Characters of arguments that a key in a checkpoint spells out; of longer ones it has a digest."""

_MAX_PIECES = 10_000
"""Values and brackets of the arguments that count: of a list of millions its beginning."""


def _records_arguments(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def initialize(self: Callback, *args: Any, **kwargs: Any) -> None:
        if "_made_with" not in self.__dict__:  # set already where a derived class's calls this one
            self.__dict__["_made_with"] = _in_words(signature, (self, *args), kwargs)
        init(self, *args, **kwargs)

    return initialize


def _in_words(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the constructor says it better
        return ""
    named = sorted(list(bound.items())[1:])  # without self
    named = [(name, value) for name, value in named if not _same_words(value, signature.parameters[name].default)]
    pieces = chain.from_iterable(_pieces(value, f", {name}=") for name, value in named)
    words = "".join(islice(pieces, _MAX_PIECES)).removeprefix(", ")
    return words if len(words) <= _MAX_WORDS else hashlib.sha256(words.encode(errors="replace")).hexdigest()[:16]


def _same_words(one: Any, other: Any) -> bool:
    """Whether two values have one text; an argument that has its default's tells no callback from another."""
    if other is inspect.Parameter.empty:
        return False
    pairs = islice(zip_longest(_pieces(one), _pieces(other)), _MAX_PIECES)
    return all(first == second for first, second in pairs)


def _pieces(value: Any, before: str = "") -> Iterator[str]:
    """The text of a value that is the same in every process, bit by bit; of an object the name of its class."""
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
