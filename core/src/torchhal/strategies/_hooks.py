"""Declare the hooks of a strategy for the phases of a run, which the Trainer's loops call on every rank."""

from __future__ import annotations

import warnings
from typing import Any


class StrategyHooks:
    """The hooks of a strategy for the phases of a run: training, its epochs and batches, evaluations, and an error.

    All bodies are empty. The Trainer's loops call them on every rank, at the same step; a loop written by hand calls
    those that it needs. The hooks of a batch are looked up once per loop, and a strategy without them costs nothing
    per batch. Rules for all of them:

    * Order: a strategy's hook is called last, after the callbacks' and the module's of the same name. So phases nest
      as ``train_start, train_epoch_start, train_batch_start, train_batch_end, evaluation_start, evaluation_end,
      train_epoch_end, train_end``.
    * Pairs: the end of training, of an epoch and of an evaluation is called once for each start that returned, the
      innermost first. A run that a signal stops calls them when all ranks have stopped after the same step and the
      interrupted run is saved. A run that fails calls :meth:`on_exception` and then the ends that are left, on this
      rank alone: :attr:`failure` is set, and they must not communicate. The end of a batch has no such promise.
    * Errors: what a hook raises ends the run as an error in a step does. After a failure it is logged only.
    * Resume: a fit that continues in the midst of an epoch calls :meth:`on_train_epoch_start` for the rest of it.
    * Random numbers drawn in a start hook don't change what a run that continues a checkpoint draws.

    Checks: STR-55.
    """

    failure: BaseException | None = None
    """The error that ends the run, set before :meth:`on_exception` and until the end of :meth:`teardown`, else None.

    Other ranks may be elsewhere once it is set, so nothing may communicate.

    .. versionadded:: 0.2
    """

    def on_train_start(self) -> None:
        """Prepare for the training of a fit, after the weights and counters of a checkpoint are in place.

        Called on every rank once per fit, after the sanity check and the hooks ``on_train_start``, before the first
        epoch; not where a fit has nothing to do.

        Checks: STR-55.

        .. versionadded:: 0.2
        """

    def on_train_end(self) -> None:
        """Finish the training of a fit.

        Called on every rank after the hooks ``on_train_end``, in which callbacks save, before ``on_fit_end``: what is
        done here is in none of their checkpoints. Also after a stop by a signal, and after an error with
        :attr:`failure` set.

        Checks: STR-55, STR-87.

        .. versionadded:: 0.2
        """

    def on_train_epoch_start(self) -> None:
        """Prepare for a training epoch, or for the rest of one, before its first batch.

        Called on every rank after the hooks ``on_train_epoch_start``. A strategy that read ``requires_grad`` when it
        wrapped the model receives here what hooks froze or unfroze.

        Checks: STR-55.

        .. versionadded:: 0.2
            Named ``begin_epoch`` before.
        """

    def on_train_epoch_end(self) -> None:
        """Finish a training epoch, or the part of one after which the fit stops or takes another position in the data.

        Called on every rank after the module's hook ``on_train_epoch_end`` and the schedulers. At the end of a whole
        epoch that is before the callbacks that save: their checkpoint has what is done here, and a run that continues
        from it doesn't do it again. After a part it comes behind them, and again when a continued run has done the
        rest. Also after a stop by a signal, and after an error with :attr:`failure` set.

        Checks: STR-55, STR-87.

        .. versionadded:: 0.2
        """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prepare for a training batch, before its step.

        Called on every rank for each batch of the loader, whether or not an optimizer step follows, and under
        ``owns_step`` too, after the hooks ``on_train_batch_start``; not if one of these ends the epoch.

        Args:
            batch: the batch on this rank's device, before the precision converts it.
            batch_idx: its index in the epoch, from 0; the first one of a continued epoch is larger.

        Checks: STR-55.

        .. versionadded:: 0.2
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Finish a training batch, after its step and its optimizer step.

        Called on every rank after the hooks ``on_train_batch_end``, before a validation that is due. Not after a step
        that raised, nor after one that made the loop take another position in the data.

        Args:
            outputs: what the step returned, without its graph.
            batch: as in :meth:`on_train_batch_start`.
            batch_idx: its index in the epoch.

        Checks: STR-55.

        .. versionadded:: 0.2
        """

    def on_evaluation_start(self, stage: str) -> None:
        """Prepare for an evaluation.

        Called on every rank after the hooks ``on_validation_start``, ``on_test_start`` or ``on_predict_start``, with
        the module in evaluation mode and without gradients, also for a rank without a batch.

        Args:
            stage: ``"sanity_check"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Checks: STR-55.

        .. versionadded:: 0.2
        """

    def on_evaluation_end(self, stage: str) -> None:
        """Finish an evaluation, still in evaluation mode and without gradients.

        Called on every rank after the hooks ``on_validation_end``, ``on_test_end`` or ``on_predict_end``, which are
        left out for an evaluation that a signal cuts short. After an error :attr:`failure` is set, and the mode may be
        another.

        Args:
            stage: as in :meth:`on_evaluation_start`.

        Checks: STR-55, STR-87.

        .. versionadded:: 0.2
        """

    def on_evaluation_batch_start(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Prepare for a batch of an evaluation, before its step.

        Called after the hooks ``on_validation_batch_start``, ``on_test_batch_start`` or ``on_predict_batch_start``, on
        the ranks that have such a batch: ranks may have different numbers, so it must not communicate.

        Args:
            stage: as in :meth:`on_evaluation_start`.
            batch: the batch on this rank's device.
            batch_idx: its index in its loader.
            dataloader_idx: index of the loader, 0 where there is one.

        Checks: STR-55, STR-85.

        .. versionadded:: 0.2
        """

    def on_evaluation_batch_end(
        self, stage: str, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Finish a batch of an evaluation, after its step.

        Called after the hooks ``on_validation_batch_end``, ``on_test_batch_end`` or ``on_predict_batch_end``, on the
        ranks that have such a batch; it must not communicate.

        Args:
            stage: as in :meth:`on_evaluation_start`.
            outputs: what the step returned.
            batch: the batch on this rank's device.
            batch_idx: its index in its loader.
            dataloader_idx: index of the loader, 0 where there is one.

        Checks: STR-55, STR-85.

        .. versionadded:: 0.2
        """

    def on_exception(self, error: BaseException) -> None:
        """React to the error that ends a run, in each process in which it ends, before any end hook that is left.

        Called once, after the callbacks' ``on_exception``, with :attr:`failure` set where the ranks may be at
        different places; it must not communicate then. A run that a signal stops has closed its phases before, and
        ``error`` is the SystemExit or KeyboardInterrupt that ends the program. :meth:`teardown` follows. What it raises
        is logged, and ``error`` is raised.

        Args:
            error: what the run raised, or the failure of another rank that was its cause.

        Checks: STR-55, STR-87.

        .. versionadded:: 0.2
        """

    def begin_epoch(self) -> None:
        """Call :meth:`on_train_epoch_start`, which replaces this method.

        .. deprecated:: 0.2
            Override or call :meth:`on_train_epoch_start`. An override of this method is called in its place until 1.0.
        """
        _warn_renamed("Strategy.begin_epoch", stacklevel=3)
        self.on_train_epoch_start()


def epoch_start_of(strategy: StrategyHooks) -> Any:
    """Return the method that starts a training epoch: ``begin_epoch`` where a subclass of before 0.2 overrides that.

    The class that comes first in the method resolution order decides, and the new name wins within one class.
    """
    for owner in type(strategy).__mro__:
        if "on_train_epoch_start" in vars(owner):
            break
        if "begin_epoch" in vars(owner):
            _warn_renamed(f"{owner.__name__}.begin_epoch", stacklevel=2)
            return strategy.begin_epoch
    return strategy.on_train_epoch_start


def _warn_renamed(name: str, stacklevel: int) -> None:
    warnings.warn(
        f"{name} is deprecated since torchhal 0.2 and goes in 1.0: override or call on_train_epoch_start instead, "
        "which the loops call at the same place",
        FutureWarning,
        stacklevel=stacklevel,
    )
