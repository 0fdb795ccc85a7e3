"""Save the state of a fit that ends by an exception, with OnExceptionCheckpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torchhal._arguments import check_path
from torchhal.checkpoint.base import DEFAULT_EXTENSION
from torchhal.errors import ConfigurationError, RankFailedError
from torchhal.strategies import Strategy
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._checkpoint_files import check_writable, join, normal_folder
from torchhal.trainer.callbacks._rank_agreement import decide_on_rank_zero
from torchhal.trainer.callbacks._whole_state import gathers_state
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class OnExceptionCheckpoint(Callback):
    """Callback that saves a checkpoint to continue from when an exception ends the fit.

    The file replaces an older one of its name at once, and stays: continue with ``ckpt_path=callback.ckpt_path``. It
    has the weights as they are then. In a run of several ranks the one that raised and rank 0 write it, each without
    the others, which may hang or be gone: random numbers, half-finished averages and the gradients of an accumulation
    are in it as far as the writing rank has them, so the continued run is close to the one that failed, not equal.

    A signal ends a run in order, for which a ``ModelCheckpoint`` saves; this callback does where none has.

    Args:
        dirpath: the folder, or an fsspec URL.
        filename: the name without its extension.

    Raises:
        ConfigurationError, ValueError: an argument outside its domain; in ``setup``, a strategy or a checkpoint IO by
            which no rank can save alone.
        CheckpointError: in ``setup``, the folder can't be written to.

    .. versionadded:: 0.2
    """

    FILE_EXTENSION = DEFAULT_EXTENSION
    """If a subclass sets another one, the name ends in it; else in the ``extension`` of the run's checkpoint IO."""

    runs_after_module = True

    @explain_unknown_arguments
    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        self.dirpath = normal_folder(check_path("dirpath", dirpath))
        if not isinstance(filename, str) or not filename:
            raise ValueError(f"'filename' must be a name without extension (got {filename!r})")
        self.filename = filename
        self._io_extension = DEFAULT_EXTENSION

    @property
    def ckpt_path(self) -> str:
        """The file, which is there after an exception."""
        extension = self._io_extension if self.FILE_EXTENSION == DEFAULT_EXTENSION else self.FILE_EXTENSION
        return join(self.dirpath, f"{self.filename}{extension}")

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:
            return
        strategy, name = trainer.strategy, type(self).__name__
        io = strategy.checkpoint_io
        self._io_extension = io.extension
        if trainer.world_size > 1 and (why := _needs_others(strategy)):
            raise ConfigurationError(
                f"{name} can't save when a rank has failed: {why}. Leave it out, and let a ModelCheckpoint save every "
                "so many steps (every_n_train_steps=...)"
            )
        decide_on_rank_zero(trainer, lambda: check_writable(self.dirpath, io.storage_options, name))

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        begun = trainer.state.fn == "fit" and trainer.fit_loop.optimization is not None
        if not begun or trainer.fast_dev_run or _is_saved(trainer, exception):
            return
        strategy, path = trainer.strategy, self.ckpt_path
        if trainer.world_size == 1:
            trainer.save_checkpoint(path)
            strategy.wait_for_checkpoints()
        elif trainer.is_global_zero or not isinstance(exception, RankFailedError):
            # Neither a collective nor the other ranks: they may be in another one, or gone.
            trainer._save_alone(path)
        else:
            return
        trainer.announce(f"fit ended by {type(exception).__name__}, after which {path!r} was saved")


def _is_saved(trainer: Trainer, exception: BaseException) -> bool:
    """Return whether this is the orderly stop by a signal, for which a ModelCheckpoint has saved."""
    in_order = isinstance(exception, KeyboardInterrupt | SystemExit)
    return in_order and any(callback.interrupted_path for callback in trainer.checkpoint_callbacks)


def _needs_others(strategy: Strategy) -> str:
    """Return why a rank can't save the whole run by itself; "" if it can."""
    if gathers_state(strategy):
        return f"strategy {strategy.display_name!r} divides the state among the ranks"
    if "sharded" in strategy.checkpoint_io.features:
        return f"{type(strategy.checkpoint_io).__name__} writes a part on each rank"
    return ""
