"""What ``self.log`` of a LightningModule writes to: the results of a run."""

from __future__ import annotations

from typing import Any

from torchhal.trainer.adapters import RunState
from torchhal_lightning._errors import LoggedValueError
from torchhal_lightning._loop_views import batches_that_stepped


class Log:
    """``log`` of a LightningModule in a run; a copy of the module has its class's own again.

    Lightning's own takes as long as all the rest of a small step, and ends in :meth:`ResultsView.log`. It is left to
    modules whose class overrides it.

    Args:
        module: whose class has Lightning's ``log``.
        run: in which it logs.
    """

    def __init__(self, module: Any, run: RunState) -> None:
        self._module = module
        self._run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return _log_of, (self._module,)

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        if on_step is False and on_epoch is False:
            return  # as Lightning does, which keeps it nowhere
        if isinstance(reduce_fx, str):
            reduce_fx = reduce_fx.lower()
        run = self._run
        try:
            run.results.log(
                name, value, run.current_hook, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist or None,
                add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
            )  # fmt: skip
        except TypeError as error:
            raise LoggedValueError(*error.args) from None


def _log_of(module: Any) -> Any:
    return type(module).log.__get__(module)


class ResultsView:
    """``trainer._results``, for modules with a ``log`` of their own around Lightning's."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    @property
    def dataloader_idx(self) -> int | None:
        return self._run.results.dataloader_idx

    @dataloader_idx.setter
    def dataloader_idx(self, index: int | None) -> None:
        self._run.results.dataloader_idx = index

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Do nothing: the loops begin an epoch themselves."""

    def log(
        self,
        fx: str,
        name: str,
        value: Any,
        *,
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_fn: Any = None,
        sync_dist_group: Any = None,
        **options: Any,
    ) -> None:
        """Record one value; without ``sync_dist`` too, values of an epoch are those of all ranks."""
        if options.get("on_step") is False and options.get("on_epoch") is False:
            return
        self._run.results.log(name, value, fx, sync_dist=sync_dist or None, **options)


class LoggerConnectorView:
    """``trainer._logger_connector``."""

    _current_fx: str | None = None

    def __init__(self, run: RunState) -> None:
        self._run = run

    def should_reset_tensors(self, fx: str) -> bool:
        return False

    @property
    def should_update_logs(self) -> bool:
        """Whether this step's values go to the loggers."""
        run = self._run
        every = run.log_every_n_steps
        return every > 0 and ((batches_that_stepped(run) + 1) % every == 0 or run.should_stop)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for logger in self._run.loggers:
            logger.log_metrics(metrics, self._run.global_step if step is None else step)
