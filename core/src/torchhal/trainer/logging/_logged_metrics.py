"""Collect what ``self.log`` is given: the values of the step and the averages of the epoch.

A value on the CPU is kept as a Python number: reading it needs no wait and costs less than a tensor operation. A
value on any other device stays there, as a copy, and is added up there; it reaches the host when it is read, never in
``log``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchhal.errors import CheckpointMismatchError, ConfigurationError
from torchhal.strategies.base import STEPS
from torchhal.trainer.logging._log_options import (
    HOOKS,
    batch_size_of,
    changed,
    check_batch_size,
    check_value,
    decide,
    is_metric,
)
from torchhal.trainer.logging._metric_accumulators import MetricAccumulator
from torchhal.trainer.logging._metric_payloads import (
    Payload,
    Ranks,
    combine,
    compute_metric,
    find_metric,
    pack,
    reduce_payload,
    restore_metric,
    to_host,
)
from torchhal.trainer.logging._metric_views import ALL_READERS, BAR, CALLBACK, LOGGED, LOGGER, EpochValues, MetricViews
from torchhal.trainer.logging._restored_accumulations import RestoredAccumulations, share_of
from torchhal.trainer.logging._step_values import Step, pack_steps, take_steps

STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Results:
    """Everything logged in one Trainer.

    The loops call, on every rank alike::

        clear()                          once, when a run begins
        find_leader()                    when the strategy has set the model up
        stage = "train" | "validate" ... when a loop takes over, and again when it takes over back
          start_batch(batch, index)      before each batch; the index only with several dataloaders
            log(...)                     by self.log, any number of times
          share_steps()                  before values of the step are read on any rank
          step_metrics()                 for the loggers, at their interval
          finalize_epoch()               before and again after the epoch-end hooks: the only other communication
          epoch_metrics()                for the loggers, once
          reset()                        after everything of the epoch

    An epoch of evaluation may lie inside one of training: what is logged belongs to the stage of its hook.

    Reading a view (:attr:`callback_metrics`, :attr:`logged_metrics`, :attr:`progress_bar_metrics`) never
    communicates. Values in the views are detached 0-d tensors; a Python number becomes a float64 tensor, so that
    it is read back as it was logged.

    Args:
        strategy: the methods of the strategy that :class:`Ranks` names.
        module: the user's module, in which a rank that never logged a metric object finds it by its attribute's name.

    Attributes:
        leaders: for each rank whether it is a data leader, on which steps end.
        leader: the first data leader; its values of a step are shown on ranks where the step leaves none.
    """

    def __init__(self, strategy: Ranks, module: Any = None) -> None:
        self.strategy = strategy
        self.module = module
        self._accumulators: dict[Any, MetricAccumulator] = {}
        self.leaders: list[bool] = []
        self.leader = 0
        self.clear()

    def clear(self) -> None:
        """Drop everything, including the values in the views and the options of the keys."""
        for accumulator in self._accumulators.values():
            accumulator.reset()
        self._accumulators.clear()
        self._restored = RestoredAccumulations()
        self._evaluated = EpochValues()
        self._views = MetricViews()
        self._kept_views: MetricViews | None = None
        self._stage = "train"
        self.start_batch(None)

    @property
    def stage(self) -> str:
        """The loop that runs now, one of :data:`STAGES`.

        Values logged in ``"sanity_check"`` are visible while it runs, and dropped at the next stage.
        """
        return self._stage

    @stage.setter
    def stage(self, stage: str) -> None:
        if stage not in STAGES:
            raise ValueError(f"'stage' must be one of {', '.join(map(repr, STAGES))} (got {stage!r})")
        if stage == "sanity_check":
            self._kept_views = self._kept_views or self._views
            self._views = MetricViews()
        elif self._kept_views is not None:
            self._views, self._kept_views = self._kept_views, None
            for accumulator in self._of("validate"):
                accumulator.unseen = 0
        self._stage = stage
        self.start_batch(None)

    def find_leader(self) -> None:
        """Gather which ranks are data leaders, once the strategy has set the model up. Every rank must call."""
        alone = self.strategy.world_size == 1
        self.leaders = [True] if alone else self.strategy.all_gather_object(self.strategy.is_data_leader)
        self.leader = self.leaders.index(True) if True in self.leaders else 0

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Weigh what is logged until the next call by the size of ``batch``; None is no batch, a weight of 1."""
        self.batch = batch
        self.dataloader_idx = dataloader_idx
        self._batch_size: int | None = None

    # -- log ---------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        hook: str | None,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Keep ``value`` under ``name``. Everything is checked at a key's first call, later ones only store.

        Args:
            name: its name in loggers and callbacks. Logged both ways it appears as ``name_step``,
                ``name_epoch`` and ``name``; with several dataloaders as ``name/dataloader_idx_0``.
            value: a number, a tensor with one element, or a metric object (``compute`` and ``reset``).
            hook: the hook that is running; it decides the stage, and the defaults of ``on_step`` and ``on_epoch``.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers; None is True.
            on_step: keep the value of the step. None: in the hooks of a training batch.
            on_epoch: keep the value of the epoch. None: in all other hooks.
            reduce_fx: how values of an epoch become one: ``"mean"`` (weighted by batch size), ``"sum"``,
                ``"min"``, ``"max"``, or torch's functions of these names.
            sync_dist: None: the value of the epoch is that of all ranks, the value of a step this rank's. True:
                of a step too, a collective at each call that every rank must make. False: neither.
            add_dataloader_idx: with several dataloaders, False puts all of them into one value.
            batch_size: the weight in a mean; None: the first dimension of the first tensor in the batch.
            metric_attribute: the attribute of the module that holds a metric object, for ranks that never log it.
            rank_zero_only: other ranks' calls do nothing, and the value is never synced.

        Raises:
            TypeError, ValueError: a name, value or option that can't be logged.
            ConfigurationError: the hook has no step or epoch to log for, an unknown reduction, or options other
                than those of the key's first call.
        """
        accumulator = self._accumulators.get((name, hook, self.dataloader_idx))
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
        if accumulator is None:
            check_value(name, value)
            check_batch_size(name, batch_size)
            accumulator = self._open(name, hook, options)
        elif accumulator.asked != options:
            raise changed(name, accumulator.hook, accumulator.asked, options)
        kind = type(value)
        if kind is Tensor and value.is_cpu:
            try:
                number = value.item()  # CPU memory: no wait
            except RuntimeError:
                check_value(name, value)  # raises for its shape, with a better message
                raise
            accumulator.dtype = value.dtype
        elif kind is float or kind is int:
            number = value
            accumulator.dtype = torch.float64
        else:
            self._log_other(accumulator, value, batch_size, metric_attribute)
            return
        if accumulator.simple:  # only the value of the step, only of this rank
            accumulator.step = number
            accumulator.unseen = ALL_READERS
            return
        if accumulator.muted:
            return
        if accumulator.options.on_step:
            accumulator.step = self._reduced(number, accumulator.options.reduction) if accumulator.sync_step else number
            accumulator.unseen = ALL_READERS
        if accumulator.options.on_epoch:
            if accumulator.weighted:
                accumulator.add(number, self._weight(accumulator) if batch_size is None else batch_size)
            else:
                accumulator.add(number, 1)

    def _open(self, name: str, hook: str | None, asked: tuple[Any, ...]) -> MetricAccumulator:
        """Check and decide the options of a new key, and return its accumulator."""
        options = decide(name, hook, asked)
        assert hook is not None
        index = self.dataloader_idx if options.add_dataloader_idx else None
        for accumulator in self._accumulators.values():  # another dataloader's key with add_dataloader_idx=False
            if accumulator.identity == (name, hook, index):
                if accumulator.asked != asked:
                    raise changed(name, hook, accumulator.asked, asked)
                break
        else:
            accumulator = MetricAccumulator(name, hook, index, asked, options)
            on_leaders = self.leader != 0 and hook in STEPS  # a collective there would wait for ranks without the call
            accumulator.muted = options.rank_zero_only and self.strategy.global_rank != (
                self.leader if on_leaders else 0
            )
            accumulator.sync_step = options.sync_step and self.strategy.world_size > 1 and not on_leaders
            accumulator.simple = not (options.on_epoch or accumulator.sync_step or accumulator.muted)
            accumulator.weighted = options.reduction == "mean"
            self._restored.restore(accumulator)
        self._accumulators[name, hook, self.dataloader_idx] = accumulator
        if index is None and self.dataloader_idx is not None:
            accumulator.loaders.add(self.dataloader_idx)
        return accumulator

    def _log_other(
        self, accumulator: MetricAccumulator, value: Any, batch_size: Any, metric_attribute: str | None
    ) -> None:
        """Log values on a device, subclasses of Tensor, metric objects and numbers of other types."""
        options = accumulator.options
        if accumulator.muted:
            return
        if is_metric(value):
            accumulator.take_metric(value, metric_attribute, self.module)
            if options.on_step:
                accumulator.take_forward_value()
                accumulator.unseen = ALL_READERS
            return
        check_value(accumulator.name, value)
        if isinstance(value, Tensor):
            kept: Any = value.detach()
            if hasattr(kept, "full_tensor"):  # sharded: its value is that of all shards
                kept = kept.full_tensor()
            # A copy: in-place changes of the model's tensor must not change the logged value.
            kept = kept.clone().reshape(())
            accumulator.dtype = kept.dtype
        else:
            kept = float(value)
            accumulator.dtype = torch.float64
        if options.on_step:
            accumulator.step = self._reduced(kept, options.reduction) if accumulator.sync_step else kept
            accumulator.unseen = ALL_READERS
        if options.on_epoch:
            weight: Any = 1
            if accumulator.weighted:
                weight = self._weight(accumulator) if batch_size is None else batch_size
            accumulator.add(kept, weight)

    def _reduced(self, value: Any, reduction: str) -> Any:
        """Reduce ``value`` over the ranks; a sum counts one of those that see the same samples."""
        if reduction == "sum" and not self.strategy.is_data_leader:
            value = value.new_zeros(()) if isinstance(value, Tensor) else type(value)(0)
        return self.strategy.reduce(value, reduction)

    def _weight(self, accumulator: MetricAccumulator) -> int:
        """Return the size of the current batch, or 1 in a hook without one."""
        size = self._batch_size
        if size is None:
            if self.batch is None or not HOOKS[accumulator.hook].step_allowed:
                return 1
            found = batch_size_of(self.batch)
            if found is None:
                raise ConfigurationError(
                    f"the batch size that weighs {accumulator.name!r} in its mean can't be read from a batch of type "
                    f"{type(self.batch).__name__}: pass batch_size=... to self.log"
                )
            size = self._batch_size = found
        return size

    # -- epochs --------------------------------------------------------------------------------------------------

    def finalize_epoch(self) -> None:
        """Turn everything accumulated in this stage into values of the epoch. Every rank must call.

        With several processes exactly one collective runs, independent of what each rank logged: a rank without a key,
        or without any batch, contributes nothing to that key and gets its value. A metric object's own ``compute``
        follows, in the same order on every rank. Safe to call again: only what came since is computed.
        """
        stage = self._stage
        accumulators = [accumulator for accumulator in self._of(stage) if accumulator.dirty]
        payloads = [pack(accumulator) for accumulator in accumulators] + self._restored.pop(_stage_of(stage))
        metrics = {each.identity: each.metric for each in accumulators if each.metric is not None}
        if self.strategy.world_size > 1:
            steps = self._pack_steps() if self.leader else []
            payloads, everybody = combine(payloads, self.strategy, steps, leader=self.leader)
            if self.leader:
                take_steps(self._accumulators, everybody, self.leader)
        self._views.update(CALLBACK, self._accumulators.values())
        self._views.update(BAR, self._accumulators.values())
        self._views.update(LOGGED, self._accumulators.values())
        self._evaluated.start(stage)
        for payload in sorted(payloads, key=_order):
            if payload["metric"]:
                metric = metrics.get(payload["identity"])
                value = compute_metric(payload["name"], find_metric(payload, self.module) if metric is None else metric)
            else:
                value = reduce_payload(payload)
            names = self._views.publish(payload, value)
            index = payload["identity"][2]
            self._evaluated.add(stage, names, value, payload["loaders"] if index is None else {index})

    def reset(self) -> None:
        """End the epoch of this stage: drop what was not finalized, reset the metric objects. The views stay."""
        for accumulator in self._of(self._stage):
            if accumulator.hook != "on_train_start":  # runs before the first epoch that it belongs to
                accumulator.reset()
        self._restored.pop(_stage_of(self._stage))
        self._evaluated.end(self._stage)
        self.start_batch(None)

    def _of(self, stage: str) -> Iterable[MetricAccumulator]:
        """Return the accumulators of a stage, each once, though several dataloaders may share one."""
        stage = _stage_of(stage)
        return {id(each): each for each in self._accumulators.values() if each.stage == stage}.values()

    # -- values of a step, between ranks -----------------------------------------------------------------------------

    def share_steps(self) -> None:
        """Bring the leader's newest values of the step to the ranks that have none. Every rank must call.

        Communicates only where a step does not end on rank 0, as in a pipeline. Values of ``sync_dist=True`` become
        those of all leaders here.
        """
        if self.leader:
            take_steps(self._accumulators, self.strategy.all_gather_object(self._pack_steps()), self.leader)

    def _pack_steps(self) -> list[Step]:
        return pack_steps(self._accumulators.values(), is_data_leader=self.strategy.is_data_leader)

    # -- views -----------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name, of all stages of this run, always in one dict, which may be written to."""
        self._views.update(CALLBACK, self._accumulators.values())
        return self._views.callback

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name that the loggers get, of steps and of epochs."""
        self._views.update(LOGGED, self._accumulators.values())
        return self._views.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The numbers for the progress bar by name; a read waits for the device on which values lie."""
        self._views.update(BAR, self._accumulators.values())
        shown = self._views.bar
        return {name: float(value) for name, value in zip(shown, to_host(shown.values()), strict=True)}

    def step_metrics(self) -> dict[str, Tensor]:
        """Return what this stage logged on steps, for the loggers, since the last call; each value once."""
        return self._views.update(LOGGER, self._accumulators.values(), _stage_of(self._stage))

    def epoch_metrics(self) -> dict[str, Tensor]:
        """Return the values of epochs, for the loggers, that were finalized since the last call."""
        return self._views.take_epoch_log()

    def evaluation_results(self, num_dataloaders: int = 1) -> list[dict[str, float]]:
        """Return one dict per dataloader with the values of this stage's last epoch.

        Values that belong to no dataloader are in each.
        """
        return self._evaluated.by_dataloader(self._stage, num_dataloaders)

    # -- resume in the middle of an epoch ----------------------------------------------------------------------------

    def state_dict(self, *, alone: bool = False) -> dict[str, Any]:
        """Return what all ranks accumulated and did not finalize, as plain data. Every rank must call.

        Args:
            alone: only this rank calls; what the others accumulated is left out.
        """
        if not alone:
            self.share_steps()
        stages = self._restored.by_stage()
        for stage in ("train", "validate", "test"):
            dirty = [pack(accumulator, keep=True) for accumulator in self._of(stage) if accumulator.dirty]
            if dirty:
                stages.setdefault(stage, []).extend(dirty)
        if alone:
            own = self.strategy.global_rank
            ranks = [stages if rank == own else {} for rank in range(self.strategy.world_size)]
        else:
            ranks = self.strategy.all_gather_object(stages) if self.strategy.world_size > 1 else [stages]
        return {
            "ranks": ranks,
            "leaders": self.leaders or [True] * len(ranks),
            "callback_metrics": {
                name: value.detach().to("cpu") if isinstance(value, Tensor) else value
                for name, value in self.callback_metrics.items()
            },
            "progress_bar_metrics": self.progress_bar_metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, also with another number of ranks. Replaces everything so far."""
        try:
            ranks, callback, bar = state["ranks"], state["callback_metrics"], state["progress_bar_metrics"]
        except (KeyError, TypeError) as error:
            raise CheckpointMismatchError(f"the logged values in the checkpoint can't be read: {error!r}") from error
        self.clear()
        self._views.callback.update(callback)
        self._views.bar.update(bar)
        leaders = self.leaders or [True] * self.strategy.world_size
        saved_leaders = state.get("leaders") or [True] * len(ranks)
        self._restored.load(share_of(ranks, saved_leaders, leaders, self.strategy.global_rank))
        for payload in self._restored:
            metric_state = payload.pop("metric_state", None)
            if metric_state is not None:
                restore_metric(find_metric(payload, self.module), metric_state)


def _stage_of(stage: str) -> str:
    """Return the stage under which values are kept: a sanity check runs the hooks of validation."""
    return "validate" if stage == "sanity_check" else stage


def _order(payload: Payload) -> tuple[str, str, int]:
    name, hook, index = payload["identity"]
    return name, hook, -1 if index is None else index
