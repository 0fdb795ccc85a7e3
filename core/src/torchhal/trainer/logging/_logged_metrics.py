"""What ``self.log`` collects: the values of the step, the averages of the epoch, and who may see them.

A value on the CPU is kept as a Python number: reading it waits for nothing and costs less than a tensor
operation. A value on any other device stays there, as a copy, and is added up there; it reaches the host when
somebody reads it, never in ``log``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from torchhal.trainer.logging._metric_accumulators import (
    MetricAccumulator,
    Payload,
    Ranks,
    Step,
    combine,
    compute_metric,
    merge_by_key,
    pack,
    reduce_numbers,
    reduced,
    restore_metric,
    to_host,
)

STAGES = ("train", "sanity_check", "validate", "test", "predict")

# Who has not seen the newest step value of an entry yet; each reader clears its own bit.
_LOGGER, _CALLBACK, _BAR, _LOGGED, _RANKS = 1, 2, 4, 8, 16
_EVERYBODY = _LOGGER | _CALLBACK | _BAR | _LOGGED | _RANKS


@dataclass
class _Views:
    """What readers are shown: the newest value of each name."""

    callback: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    bar: dict[str, Any] = field(default_factory=dict)
    epoch_log: dict[str, Tensor] = field(default_factory=dict)


class Results:
    """Everything logged in one Trainer. The loops call, on every rank alike::

        clear()                          once, when a run begins
        find_leader()                    when the strategy has set the model up
        stage = "train" | "validate" ... when a loop takes over, and again when it takes over back
          start_batch(batch, index)      before each batch; the index only with several dataloaders
            log(...)                     by self.log, any number of times
          share_steps()                  before anybody on all ranks looks at values of the step
          step_metrics()                 for the loggers, at their interval
          finalize_epoch()               before and again after the epoch-end hooks: the only other communication
          epoch_metrics()                for the loggers, once
          reset()                        after everything of the epoch

    An epoch of evaluation may lie inside one of training: what is logged belongs to the stage of its hook.

    Reading a view (:attr:`callback_metrics`, :attr:`logged_metrics`, :attr:`progress_bar_metrics`) never
    communicates. Values in the views are detached 0-d tensors; a Python number becomes a float64 tensor, so that
    it is read back as it was logged.
    """

    def __init__(self, strategy: Ranks, module: Any = None) -> None:
        """``module`` is where a rank that never logged a metric object finds it by its attribute's name."""
        self.strategy = strategy
        self.module = module
        self._entries: dict[Any, MetricAccumulator] = {}
        self.leaders: list[bool] = []
        """Of each rank whether it is a data leader, on which steps end."""
        self.leader = 0
        """The first of them: its values of a step are shown on ranks where the step leaves none."""
        self.clear()

    def clear(self) -> None:
        """Forget everything, the values in the views and the options of the keys too."""
        for entry in self._entries.values():
            entry.reset()
        self._entries.clear()
        self._restored: dict[str, list[Payload]] = {}
        self._evaluated: dict[str, dict[str, tuple[Any, int | None]]] = {}
        self._views = _Views()
        self._kept_views: _Views | None = None
        self._ended: set[str] = set()
        self._stage = "train"
        self.start_batch(None)

    @property
    def stage(self) -> str:
        """The loop that runs now, one of :data:`STAGES`.

        What ``"sanity_check"`` logs is seen while it runs, and is gone with the next stage.
        """
        return self._stage

    @stage.setter
    def stage(self, stage: str) -> None:
        if stage not in STAGES:
            raise ValueError(f"'stage' must be one of {', '.join(map(repr, STAGES))} (got {stage!r})")
        if stage == "sanity_check":
            self._kept_views = self._kept_views or self._views
            self._views = _Views()
        elif self._kept_views is not None:
            self._views, self._kept_views = self._kept_views, None
            for entry in self._of("validate"):
                entry.unseen = 0
        self._stage = stage
        self.start_batch(None)

    def find_leader(self) -> None:
        """Ask every rank, once the strategy has set the model up, whether steps end on it. Every rank must call."""
        alone = self.strategy.world_size == 1
        self.leaders = [True] if alone else self.strategy.all_gather_object(self.strategy.is_data_leader)
        self.leader = self.leaders.index(True) if True in self.leaders else 0

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """The batch whose size weighs what is logged until the next call; None: no batch, a weight of 1."""
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
            name: what loggers and callbacks know it by. Logged both ways it appears as ``name_step``,
                ``name_epoch`` and ``name``; with several dataloaders as ``name/dataloader_idx_0``.
            value: a number, a tensor with one element, or a metric object (``compute`` and ``reset``).
            hook: the hook that is running; it decides the stage, and the defaults of ``on_step`` and ``on_epoch``.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers; None is True.
            on_step, on_epoch: keep the value of the step, the value of the epoch. None: on_step in the hooks of a
                training batch, on_epoch everywhere else.
            reduce_fx: how values of an epoch become one: ``"mean"`` (weighted by batch size), ``"sum"``,
                ``"min"``, ``"max"``, or torch's functions of these names.
            sync_dist: None: the value of the epoch is that of all ranks, the value of a step this rank's. True:
                of a step too, a collective at each call that every rank must make. False: neither.
            add_dataloader_idx: with several dataloaders, False puts all of them into one value.
            batch_size: the weight in a mean; None: the first dimension of the first tensor in the batch.
            metric_attribute: where a metric object hangs in the module, for ranks that never log it.
            rank_zero_only: other ranks' calls do nothing, and the value is never synced.

        Raises:
            TypeError, ValueError: a name, value or option that can't be logged.
            ConfigurationError: the hook has no step or epoch to log for, an unknown reduction, or options other
                than those of the key's first call.
        """
        entry = self._entries.get((name, hook, self.dataloader_idx))
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
        if entry is None:
            check_value(name, value)
            check_batch_size(name, batch_size)
            entry = self._open(name, hook, options)
        elif entry.asked != options:
            raise changed(name, entry.hook, entry.asked, options)
        kind = type(value)
        if kind is Tensor and value.is_cpu:
            try:
                number = value.item()  # CPU memory: nothing to wait for
            except RuntimeError:
                check_value(name, value)  # says what is wrong with its shape
                raise
            entry.dtype = value.dtype
        elif kind is float or kind is int:
            number = value
            entry.dtype = torch.float64
        else:
            self._log_other(entry, value, batch_size, metric_attribute)
            return
        if entry.simple:  # only the value of the step, only of this rank
            entry.step = number
            entry.unseen = _EVERYBODY
            return
        if entry.muted:
            return
        if entry.options.on_step:
            entry.step = self._reduced(number, entry.options.reduction) if entry.sync_step else number
            entry.unseen = _EVERYBODY
        if entry.options.on_epoch:
            if entry.weighted:
                entry.add(number, self._weight(entry) if batch_size is None else batch_size)
            else:
                entry.add(number, 1)

    def _open(self, name: str, hook: str | None, asked: tuple[Any, ...]) -> MetricAccumulator:
        """A new key: everything about it is checked and decided here."""
        options = decide(name, hook, asked)
        assert hook is not None
        index = self.dataloader_idx if options.add_dataloader_idx else None
        for entry in self._entries.values():  # another dataloader's key with add_dataloader_idx=False
            if entry.identity == (name, hook, index):
                if entry.asked != asked:
                    raise changed(name, hook, entry.asked, asked)
                break
        else:
            entry = MetricAccumulator(name, hook, index, asked, options)
            on_leaders = self.leader != 0 and hook in STEPS  # a collective there would wait for ranks that never come
            entry.muted = options.rank_zero_only and self.strategy.global_rank != (self.leader if on_leaders else 0)
            entry.sync_step = options.sync_step and self.strategy.world_size > 1 and not on_leaders
            entry.simple = not (options.on_epoch or entry.sync_step or entry.muted)
            entry.weighted = options.reduction == "mean"
            self._take_restored(entry)
        self._entries[name, hook, self.dataloader_idx] = entry
        return entry

    def _log_other(self, entry: MetricAccumulator, value: Any, batch_size: Any, metric_attribute: str | None) -> None:
        """Values on a device, subclasses of Tensor, metric objects, numbers of other types."""
        options = entry.options
        if entry.muted:
            return
        if is_metric(value):
            entry.take_metric(value, metric_attribute, self.module)
            if options.on_step:
                entry.take_forward_value()
                entry.unseen = _EVERYBODY
            return
        check_value(entry.name, value)
        if isinstance(value, Tensor):
            kept: Any = value.detach()
            if hasattr(kept, "full_tensor"):  # sharded: its value is that of all shards
                kept = kept.full_tensor()
            # A copy: what was logged must not follow when the model changes its tensor in place.
            kept = kept.clone().reshape(())
            entry.dtype = kept.dtype
        else:
            kept = float(value)
            entry.dtype = torch.float64
        if options.on_step:
            entry.step = self._reduced(kept, options.reduction) if entry.sync_step else kept
            entry.unseen = _EVERYBODY
        if options.on_epoch:
            weight: Any = 1
            if entry.weighted:
                weight = self._weight(entry) if batch_size is None else batch_size
            entry.add(kept, weight)

    def _reduced(self, value: Any, reduction: str) -> Any:
        """Over the ranks; a sum counts one of those that see the same samples."""
        if reduction == "sum" and not self.strategy.is_data_leader:
            value = value.new_zeros(()) if isinstance(value, Tensor) else type(value)(0)
        return self.strategy.reduce(value, reduction)

    def _weight(self, entry: MetricAccumulator) -> int:
        size = self._batch_size
        if size is None:
            if self.batch is None or not HOOKS[entry.hook].step_allowed:
                return 1
            found = batch_size_of(self.batch)
            if found is None:
                raise ConfigurationError(
                    f"the batch size that weighs {entry.name!r} in its mean can't be read from a batch of type "
                    f"{type(self.batch).__name__}: pass batch_size=... to self.log"
                )
            size = self._batch_size = found
        return size

    # -- epochs --------------------------------------------------------------------------------------------------

    def finalize_epoch(self) -> None:
        """Turn everything accumulated in this stage into values of the epoch. Every rank must call.

        With several processes exactly one collective runs, whatever each rank logged: a rank without a key, or
        without any batch, contributes nothing to that key and sees its value. A metric object's own ``compute``
        follows, in the same order on every rank. Safe to call again: only what came since is computed.
        """
        stage = self._stage
        entries = [entry for entry in self._of(stage) if entry.dirty]
        payloads = [pack(entry) for entry in entries] + self._restored.pop(_accumulated(stage), [])
        metrics = {entry.identity: entry.metric for entry in entries if entry.metric is not None}
        if self.strategy.world_size > 1:
            steps = self._steps() if self.leader else []
            payloads, everybody = combine(payloads, self.strategy, steps, leader=self.leader)
            if self.leader:
                self._take_steps(everybody)
        self._see(_CALLBACK)
        self._see(_BAR)
        self._see(_LOGGED)
        if stage in self._ended:
            self._ended.remove(stage)
            self._evaluated.pop(stage, None)
        for payload in sorted(payloads, key=_order):
            if payload["metric"]:
                metric = metrics.get(payload["identity"])
                value = compute_metric(payload["name"], self._metric_of(payload) if metric is None else metric)
            else:
                value = reduced(payload)
            self._publish(payload, value)

    def _metric_of(self, payload: Payload) -> Any:
        path = payload["metric"]
        metric: Any = None
        if isinstance(path, str):
            try:
                metric = operator.attrgetter(path)(self.module)
            except AttributeError:
                pass
        if metric is None:
            raise ConfigurationError(
                f"the metric object logged as {payload['name']!r} can't be found on this rank, which did not log it "
                "itself but must take part in its compute(): make it an attribute of the module, or pass "
                "metric_attribute"
            )
        return metric

    def _publish(self, payload: Payload, value: Tensor) -> None:
        name, suffix, views = payload["name"], payload["suffix"], self._views
        plain = name + suffix
        epoch = f"{name}_epoch{suffix}" if payload["both"] else plain
        views.callback[plain] = views.callback[epoch] = value
        evaluated = self._evaluated.setdefault(self._stage, {})
        evaluated[plain] = evaluated[epoch] = (value, payload["identity"][2])
        if payload["logger"]:
            views.logged[epoch] = views.epoch_log[epoch] = value
        if payload["prog_bar"]:
            views.bar[epoch] = value

    def reset(self) -> None:
        """End the epoch of this stage: drop what was not finalized, reset the metric objects. The views stay."""
        for entry in self._of(self._stage):
            if entry.hook != "on_train_start":  # runs before the first epoch that it belongs to
                entry.reset()
        self._restored.pop(_accumulated(self._stage), None)
        self._ended.add(self._stage)
        self.start_batch(None)

    def _of(self, stage: str) -> Iterable[MetricAccumulator]:
        stage = _accumulated(stage)
        # several dataloaders may share an entry
        return {id(entry): entry for entry in self._entries.values() if entry.stage == stage}.values()

    # -- values of a step, between ranks -----------------------------------------------------------------------------

    def share_steps(self) -> None:
        """Bring the leader's newest values of the step to the ranks that have none. Every rank must call.

        Communicates only where a step does not end on rank 0, as in a pipeline. Values of ``sync_dist=True`` become
        those of all leaders here.
        """
        if self.leader:
            self._take_steps(self.strategy.all_gather_object(self._steps()))

    def _steps(self) -> list[Step]:
        """What this rank logged in steps of training since it was last asked, as plain data."""
        entries = []
        for entry in {id(entry): entry for entry in self._entries.values()}.values():
            if entry.unseen & _RANKS and entry.stage == "train":
                entry.unseen &= ~_RANKS
                if not entry.borrowed:
                    entries.append(entry)
        if not self.strategy.is_data_leader:
            return []
        numbers = to_host([entry.step for entry in entries])
        return [
            (*entry.identity, entry.asked, entry.dtype, number) for entry, number in zip(entries, numbers, strict=True)
        ]

    def _take_steps(self, everybody: list[list[Step]]) -> None:
        """Take the leader's values of steps where this rank has none of its own, and the common ones everywhere."""
        brought: dict[Any, list[Any]] = {}
        for steps in everybody:
            for name, hook, index, _, _, number in steps:
                brought.setdefault((name, hook, index), []).append(number)
        for name, hook, index, asked, dtype, number in everybody[self.leader]:
            entry = self._entries.get((name, hook, index))
            if entry is None:
                entry = self._entries[name, hook, index] = MetricAccumulator(
                    name, hook, index, asked, decide(name, hook, asked)
                )
                entry.borrowed = True
            if entry.options.sync_step and hook in STEPS:
                number = reduce_numbers(entry.options.reduction, brought[name, hook, index])
            elif not entry.borrowed:
                continue
            entry.step, entry.dtype = number, dtype
            entry.unseen = _EVERYBODY & ~_RANKS

    # -- views -----------------------------------------------------------------------------------------------------

    def _see(self, reader: int, stage: str | None = None) -> dict[str, Tensor]:
        """Bring one reader's view up to date with the step values it has not seen; returns the new ones."""
        new: dict[str, Any] = {}
        for entry in self._entries.values():
            if entry.unseen & reader and (stage is None or entry.stage == stage):
                entry.unseen &= ~reader
                if reader == _CALLBACK:
                    if entry.stage == "train":  # evaluation offers its epoch values only, as monitors expect
                        new[entry.plain_name] = new[entry.step_name] = entry.step_value()
                elif reader == _BAR:
                    if entry.options.prog_bar:
                        new[entry.step_name] = entry.step
                elif entry.options.logger:
                    new[entry.step_name] = entry.step_value()
        if reader == _CALLBACK:
            self._views.callback.update(new)
        elif reader == _BAR:
            self._views.bar.update(new)
        elif reader == _LOGGED:
            self._views.logged.update(new)
        return new

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Name to the newest value, of all stages of this run; the same dict each time, and it may be written to."""
        self._see(_CALLBACK)
        return self._views.callback

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Name to the newest value that the loggers get, of steps and of epochs."""
        self._see(_LOGGED)
        return self._views.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Name to number for the progress bar. Waits for the device where values lie on one: read it seldom."""
        self._see(_BAR)
        shown = self._views.bar
        return {name: float(value) for name, value in zip(shown, to_host(shown.values()), strict=True)}

    def step_metrics(self) -> dict[str, Tensor]:
        """What this stage logged on steps, for the loggers, since the last call; each value is given once."""
        return self._see(_LOGGER, _accumulated(self._stage))

    def epoch_metrics(self) -> dict[str, Tensor]:
        """The values of epochs, for the loggers, that were finalized since the last call."""
        finished, self._views.epoch_log = self._views.epoch_log, {}
        return finished

    def evaluation_results(self, num_dataloaders: int = 1) -> list[dict[str, float]]:
        """One dict per dataloader with this stage's values of its last epoch; keys without an index are in each."""
        finished = self._evaluated.get(self._stage, {})
        numbers = to_host(value for value, _ in finished.values())
        return [
            {
                name: float(number)
                for (name, (_, owner)), number in zip(finished.items(), numbers, strict=True)
                if owner is None or owner == index
            }
            for index in range(num_dataloaders)
        ]

    # -- resume in the middle of an epoch ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was accumulated and is not finalized, of all ranks, as plain data. Every rank must call."""
        self.share_steps()
        stages: dict[str, list[Payload]] = {stage: list(waiting) for stage, waiting in self._restored.items()}
        for stage in ("train", "validate", "test"):
            dirty = [pack(entry, keep=True) for entry in self._of(stage) if entry.dirty]
            if dirty:
                stages.setdefault(stage, []).extend(dirty)
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
        for stages in self._share_of(ranks, state.get("leaders") or [True] * len(ranks)):
            for stage, payloads in stages.items():
                self._restored.setdefault(stage, []).extend(
                    {**payload, "identity": tuple(payload["identity"])} for payload in payloads
                )
        for payloads in self._restored.values():
            payloads[:] = merge_by_key(payloads)
            for payload in payloads:
                metric_state = payload.pop("metric_state", None)
                if metric_state is not None:
                    restore_metric(self._metric_of(payload), metric_state)

    def _share_of(self, ranks: list[Any], led: list[bool]) -> list[Any]:
        """What this rank goes on with of what ``ranks`` have saved, of which those that ``led`` saw other samples each.

        Sums of several saved ranks add up in one; a rank beyond the saved ones starts with nothing.
        """
        rank = self.strategy.global_rank
        leaders = self.leaders or [True] * self.strategy.world_size
        if leaders == led:
            return ranks[rank : rank + 1]
        if not leaders[rank]:
            return []
        counted = [stages for stages, leads in zip(ranks, led, strict=True) if leads]
        return counted[sum(leaders[:rank]) :: sum(leaders)]

    def _take_restored(self, entry: MetricAccumulator) -> None:
        waiting = self._restored.get(entry.stage, [])
        for payload in waiting:
            if payload["identity"] == entry.identity:
                entry.total, entry.weight = payload["total"], payload["weight"]
                waiting.remove(payload)
                return


def _accumulated(stage: str) -> str:
    """The stage under which values are kept: a sanity check runs the hooks of validation."""
    return "validate" if stage == "sanity_check" else stage


def _order(payload: Payload) -> tuple[str, str, int]:
    name, hook, index = payload["identity"]
    return name, hook, -1 if index is None else index
