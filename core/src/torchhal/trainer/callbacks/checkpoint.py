"""ModelCheckpoint: which states of a run are kept, and under which names."""

from __future__ import annotations

import copy
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from torchhal._arguments import check_bool, check_count, check_optional_count
from torchhal.checkpoint._location import is_url
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._checkpoint_files import check_writable, earlier_runs, join, normal_folder
from torchhal.trainer.callbacks._checkpoint_names import check_pattern, fill_pattern
from torchhal.trainer.callbacks._monitor import (
    check_mode,
    check_monitor,
    check_score,
    is_better,
    missing_metric,
    validates_once_per_epoch,
)
from torchhal.trainer.callbacks._synced_timer import SharedClock
from torchhal.trainer.callbacks._written_files import EXPIRES_S, Waiting, WrittenFiles, take_over
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer

# What a resumed run must know, by attribute: in any folder, and only in the folder it was written in.
_STATE = ("best_model_path", "best_model_score", "current_score", "_seen_at", "_written_at")
_STATE_OF_FOLDER = ("best_k_models", "last_model_path", "_newest", "_interrupted", "_doomed", "_inherited")


class ModelCheckpoint(Callback):
    """Saves checkpoints while training, and keeps the best or the newest of them.

    Rank 0 decides what is saved and what goes, and tells the others. A file is deleted or replaced only when its
    successor is durable, and only if this run, or the one it resumes in the same folder, wrote it, which a record in
    the folder's ``.torchhal`` has to show; anything else of the same name is left alone and the new file gets ``-v1``,
    ``-v2``, ... Nothing is saved in a sanity check or under ``fast_dev_run``. When a signal ends the run between two
    steps, one more checkpoint to resume from is written.

    Args:
        dirpath: the folder, or an fsspec URL; ``<log folder of the first logger>/checkpoints`` by default.
        filename: a pattern; ``{epoch}``, ``{step}`` and every logged name may stand in it. Default
            ``"{epoch}-{step}"``, which becomes ``epoch=0-step=64.ckpt``.
        monitor: the logged value that says which is best; None keeps the newest.
        verbose: say what was saved.
        save_last: also keep ``last.ckpt``, the newest state, updated with every save and at the end of each epoch.
            It is a second name of what was just saved, where the file system has links, not a second save.
        save_top_k: how many to keep: -1 all, 0 none.
        save_weights_only: leave out what resuming needs.
        mode: whether the best is the ``"min"`` or the ``"max"``.
        auto_insert_metric_name: ``{epoch}`` becomes ``epoch=3`` rather than ``3``.
        every_n_train_steps: save after every n optimizer steps.
        train_time_interval: save when so much time has passed, after the step that is running then.
        every_n_epochs: save at the end of every n-th epoch; 1 unless one of the two above is given. 0 is never.
        save_on_train_epoch_end: True: at the end of training epochs; False: after validations. By default at the
            end of epochs that have one validation, at their end, or none, else after each validation; without
            ``monitor`` at the end of epochs as well.
        enable_version_counter: False overwrites checkpoints of other runs; what is no checkpoint stays.

    Raises:
        ConfigurationError, TypeError, ValueError: arguments outside their domain, or that exclude each other.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    runs_after_module = True
    """What the model's own hook does to weights, buffers or optimizers is in the file, or a resumed run would lack it;
    at the end of an epoch all values are in."""

    @explain_unknown_arguments
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        if dirpath is not None and not isinstance(dirpath, str | os.PathLike):
            raise TypeError(f"'dirpath' must be a path or None (got {dirpath!r})")
        self._given_dirpath = None if dirpath is None else normal_folder(dirpath)
        self.dirpath: str | None = self._given_dirpath
        self.filename = None if filename is None else check_pattern("filename", filename)
        self.monitor: str | None = check_monitor(monitor, optional=True)
        self.verbose = check_bool("verbose", verbose)
        self.save_last = bool(save_last) and check_bool("save_last", save_last)
        self.save_top_k = check_count("save_top_k", save_top_k, minimum=0, unlimited=True)
        if monitor is None and self.save_top_k > 1:
            raise ConfigurationError(
                f"'save_top_k' must be -1, 0 or 1 without 'monitor' (got {save_top_k}): nothing says which is better"
            )
        self.save_weights_only = check_bool("save_weights_only", save_weights_only)
        self.mode = check_mode(mode)
        self.auto_insert_metric_name = check_bool("auto_insert_metric_name", auto_insert_metric_name)
        self.enable_version_counter = check_bool("enable_version_counter", enable_version_counter)
        self.save_on_train_epoch_end = (
            None if save_on_train_epoch_end is None else check_bool("save_on_train_epoch_end", save_on_train_epoch_end)
        )
        if self.save_last and filename == self.CHECKPOINT_NAME_LAST:
            raise ConfigurationError(f"'filename' must not be {filename!r} with save_last=True, which writes that file")
        self._set_triggers(every_n_train_steps, train_time_interval, every_n_epochs)
        self._reset_state()

    def _reset_state(self) -> None:
        self.best_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        self.best_k_models: dict[str, torch.Tensor] = {}
        self.current_score: torch.Tensor | None = None
        self.last_model_path = ""
        self._inherited: tuple[str, torch.Tensor] | None = None  # the best of the run this one resumes elsewhere
        self._newest = ""  # what is kept without a monitor
        self._interrupted = ""  # a file of save_interrupted, to go when the next one is durable
        self._doomed: list[str] = []  # own files that have a successor
        self._seen_at: tuple[int, int] | None = None
        self._written_at: tuple[int, int] | None = None
        self._files = WrittenFiles("", "")
        self._durable_path = ""  # of the latest save
        self._step_seen = 0
        self._validated = False
        self._unsettled: _Unsettled | None = None

    def _set_triggers(self, steps: Any, interval: Any, epochs: Any) -> None:
        self.every_n_train_steps = check_optional_count("every_n_train_steps", steps, minimum=0) or 0
        if interval is not None and (not isinstance(interval, timedelta) or interval <= timedelta(0)):
            raise TypeError(f"'train_time_interval' must be a positive datetime.timedelta or None (got {interval!r})")
        self.train_time_interval = interval
        epochs = check_optional_count("every_n_epochs", epochs, minimum=0)
        triggers = {
            "every_n_train_steps": self.every_n_train_steps,
            "train_time_interval": interval,
            "every_n_epochs": epochs,
        }
        given = [name for name, value in triggers.items() if value]
        if len(given) > 1:
            raise ConfigurationError(
                f"at most one of 'every_n_train_steps', 'train_time_interval' and 'every_n_epochs' must be given (got "
                f"{', '.join(given)}); use one ModelCheckpoint for each"
            )
        self.every_n_epochs: int = epochs if epochs is not None else int(not given)
        # Only on the instance, so that a run that saves by epochs calls nothing per batch.
        if self.every_n_train_steps:
            self.on_train_batch_end = self._after_step  # type: ignore[method-assign]
        elif interval is not None:
            self._clock = SharedClock(interval.total_seconds())
            self.on_train_batch_end = self._after_time  # type: ignore[method-assign]

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        """Choose the folder, together with the other ranks; nothing is created yet."""
        self.dirpath = self._given_dirpath or self._default_folder(trainer)
        self._validated = False
        storage_options = trainer.strategy.checkpoint_io.storage_options
        self._files = WrittenFiles(trainer.run_id, self.state_key, storage_options)
        if stage == "fit" and self._saves(trainer):
            folder = self.dirpath
            self._agree(trainer, lambda: check_writable(folder, storage_options))

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Find out, before a fit, whether the run that wrote this checkpoint wrote into the same folder."""
        path = normal_folder(trainer.ckpt_path or "")
        if trainer.state.fn == "fit" and os.path.dirname(path) == self.dirpath and trainer.is_global_zero:
            self._files.continues(path)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.checkpoint_callback is self:
            self._take_over(trainer)  # not before: a checkpoint that is refused is continued by nobody
        self._step_seen = trainer.global_step
        # A checkpoint that knows nothing of this callback may lead back to where it has been: what is trained from
        # there on is saved again.
        position = _position(trainer)
        if self._seen_at != position:
            self._seen_at = None
        if self._written_at != position:
            self._written_at = None
        if self.train_time_interval is not None:
            self._clock.start(trainer.global_step)

    def _take_over(self, trainer: Trainer) -> None:
        """Decide, for all that save in this fit, as which run they do. On every rank, before the first step.

        Rank 0 may have to wait for a minute, longer perhaps than the others are to wait in a collective: so each second
        it tells them that it still does.
        """
        callbacks = [callback for callback in trainer.checkpoint_callbacks if callback._saves(trainer)]
        if not callbacks:
            return
        callbacks.sort(key=lambda callback: callback._files.continued is None)
        writers = [(callback._files, callback.dirpath or "") for callback in callbacks]
        first = writers[0][0]
        run = first.run if first.continued is None else first.continued["run"]
        if trainer.ckpt_path is not None:
            pauses = _pauses(trainer, take_over(writers, wait=True))
            while self._agree(trainer, lambda: next(pauses, False)):
                pass
        elif trainer.is_global_zero:  # nobody is waited for, so the ranks need not meet
            for _ in take_over(writers, wait=False):
                pass
        trainer.run_id = first.run
        if any(files.run != run for files, _ in writers):
            trainer.announce(
                f"run {run} may still live, or another process continues it: this fit saves as a run of its own, and "
                "replaces and deletes nothing of that one"
            )

    def _saves(self, trainer: Trainer) -> bool:
        return (self.save_top_k != 0 or self.save_last) and not trainer.fast_dev_run

    def _after_step(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, self.every_n_train_steps
        # several optimizers step several times a batch: what counts is that a multiple was passed
        if step // every > max(self._step_seen, 0) // every:
            self._step_seen = step
            self._save(trainer, top_k=True)

    def _after_time(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step >= self._clock.next_look and step != self._step_seen:
            self._step_seen = step
            if self._clock.is_due(step, trainer.strategy):
                self._save(trainer, top_k=True)
                self._clock.start(step)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validated = True
        if self.save_on_train_epoch_end is None:
            wanted = not validates_once_per_epoch(trainer)
        else:
            wanted = not self.save_on_train_epoch_end
        if wanted:
            self._save(trainer, top_k=self._epoch_counts(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        wanted = self.save_on_train_epoch_end
        if wanted is None:
            wanted = self.monitor is None or validates_once_per_epoch(trainer)
        if wanted:
            self._save(trainer, top_k=self._epoch_counts(trainer))

    def _epoch_counts(self, trainer: Trainer) -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self._settle(trainer)

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._files.let_go()

    @property
    def interrupted_path(self) -> str:
        """The file from which a run that a signal has ended goes on; empty without one."""
        return self._interrupted or (self.last_model_path if self.save_last else self._durable_path)

    def save_interrupted(self, trainer: Trainer) -> None:
        """Save a state to resume from, since a signal ends the run here. Called on every rank."""
        if not self._saves(trainer) or trainer.sanity_checking:
            return
        others = [callback for callback in trainer.checkpoint_callbacks if callback.dirpath == self.dirpath]
        if others and others[0] is not self:
            return  # one is enough for a folder
        self._settle(trainer)
        if self._written_at == _position(trainer) and not self.save_weights_only:
            return
        names = self.CHECKPOINT_NAME_LAST if self.save_last else "interrupted-{epoch}-{step}"
        path = self._agree(trainer, lambda: self._free_path(trainer, names, {self.last_model_path, self._interrupted}))
        before = self._snapshot()
        self._replace("last_model_path" if self.save_last else "_interrupted", path)
        self._written_at = _position(trainer)
        try:
            trainer.save_checkpoint(path)
        except BaseException:
            self._give_up(trainer, before, (path,))
            raise
        self._unsettled = _Unsettled(before, (path,))
        self._settle(trainer)

    # -- saving ------------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, *, top_k: bool) -> None:
        """Look at the state of now once; every rank comes here at the same steps."""
        if trainer.fast_dev_run or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        position = _position(trainer)
        if position == self._seen_at:
            return
        self._settle(trainer)
        trainer.results.share_steps()
        path, score, evicted, last = self._agree(trainer, lambda: self._decide(trainer, top_k))
        paths = tuple(each for each in (path, last) if each is not None)
        before, link = self._snapshot(), None
        self._seen_at = position
        if score is not None:
            self.current_score = torch.tensor(score, dtype=torch.float64)
        try:
            if paths:
                self._written_at = position
                self._replace("_interrupted", "")
                if last is not None:
                    self._replace("last_model_path", last)
                if path is not None:
                    self._keep(path, evicted)
                # The state is that of after the save, so that a run resumed from this very file knows its own.
                trainer.save_checkpoint(paths[0], self.save_weights_only)
                if path is not None and last is not None:
                    can_link = self._can_link(trainer, path)
                    if can_link and "async" in trainer.strategy.checkpoint_io.features:
                        link = (path, last)  # once it is durable: a second save would wait for the first
                    elif not can_link or not self._link(trainer, path, last):
                        trainer.save_checkpoint(last, self.save_weights_only)
        except BaseException:
            self._give_up(trainer, before, paths)
            raise
        if paths:
            text = f"saved {path or last}" + (f" ({self.monitor}={score:.6g})" if score is not None else "")
            self._unsettled = _Unsettled(before, paths, text if self.verbose else "", link)
            if "async" not in trainer.strategy.checkpoint_io.features:
                self._settle(trainer)

    def _decide(self, trainer: Trainer, top_k: bool) -> tuple[str | None, float | None, str | None, str | None]:
        """On rank 0: (new file, its score, the file it replaces, the new ``last``); None for what isn't."""
        metrics = self._values(trainer)
        score = None
        save, evicted = top_k and self.save_top_k != 0, None
        if save and self.monitor is not None:
            if self.monitor not in metrics:
                if self._validated or not trainer.has_validation:
                    raise missing_metric(self, self.monitor, trainer.callback_metrics)
                trainer.warn_once(
                    f"ModelCheckpoint monitors {self.monitor!r}, which was not logged before the first validation: no "
                    "best checkpoint is kept until then"
                )
                save = False
            else:
                score = float(metrics[self.monitor])
                save, evicted = self._place(score)
        elif save and self.save_top_k == 1:
            evicted = self._newest or None
        path = None
        if save:
            path = self._free_path(trainer, self._pattern(), {evicted})
        last = self._free_path(trainer, self.CHECKPOINT_NAME_LAST, {self.last_model_path}) if self.save_last else None
        return path, score, evicted, last

    def _place(self, score: float) -> tuple[bool, str | None]:
        """Whether a checkpoint of this score is among the best, and which of them it drives out."""
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True, None
        worst = self.kth_best_model_path
        return is_better(self.mode, score, float(self.best_k_models[worst])), worst

    @property
    def kth_best_model_path(self) -> str:
        """The worst of those that are kept; the next to go."""
        worst = ""
        for path, score in self.best_k_models.items():
            if not worst or is_better(self.mode, float(self.best_k_models[worst]), float(score)):
                worst = path
        return worst

    def _keep(self, path: str, evicted: str | None) -> None:
        if evicted:
            self.best_k_models.pop(evicted, None)
            if evicted != path:
                self._doomed.append(evicted)
        if self.monitor is None:
            self.best_model_path = path
            self._newest = path if self.save_top_k == 1 else ""
            return
        assert self.current_score is not None
        self.best_k_models[path] = self.current_score
        if math.isnan(float(self.current_score)):
            warnings.warn(f"ModelCheckpoint: {self.monitor!r} is NaN, and a checkpoint of NaN is never the best")
        candidates = [*([self._inherited] if self._inherited else []), *self.best_k_models.items()]
        self.best_model_path, self.best_model_score = "", None
        best = float("nan")
        for candidate, score in candidates:
            if is_better(self.mode, float(score), best):
                best = float(score)
                self.best_model_path, self.best_model_score = candidate, score

    def _replace(self, attribute: str, path: str) -> None:
        """Set an own path; the file it named has a successor."""
        old = getattr(self, attribute)
        if old and old != path:
            self._doomed.append(old)
        setattr(self, attribute, path)

    def _settle(self, trainer: Trainer) -> None:
        """What was saved is durable from here on, what it replaces is deleted, and who asked hears of it. Every rank.

        If the save has failed, what is known of files is as it was before it.
        """
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            try:
                trainer.strategy.wait_for_checkpoints()
                if unsettled.link is not None:
                    source, target = unsettled.link
                    if not self._link(trainer, source, target):
                        raise CheckpointError(f"{source!r} is not there to get the second name {target!r}")
            except Exception:
                self._give_up(trainer, unsettled.before, unsettled.paths)
                raise
            self._durable_path = unsettled.paths[0]
            if trainer.is_global_zero:
                for path in unsettled.paths:
                    self._files.wrote(path)
        self._delete_doomed(trainer)
        if unsettled is None:
            return
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if hasattr(logger, "after_save_checkpoint"):
                    logger.after_save_checkpoint(self)
        if unsettled.text:
            trainer.print(unsettled.text)

    def _give_up(self, trainer: Trainer, before: Mapping[str, Any], paths: tuple[str, ...]) -> None:
        """A save has failed: what is known of files is as it was before it."""
        self._restore(before)
        if trainer.is_global_zero:
            for path in paths:
                self._files.release(path)

    def _delete_doomed(self, trainer: Trainer) -> None:
        kept = self._own()
        doomed, self._doomed = [path for path in self._doomed if path not in kept], []
        if not doomed:
            return
        for path, own in zip(doomed, self._agree(trainer, lambda: [*map(self._files.owns, doomed)]), strict=True):
            if not own:
                continue
            try:
                trainer.strategy.remove_checkpoint(path)
                if trainer.is_global_zero:
                    self._files.release(path)
            except (CheckpointError, OSError) as error:
                self._doomed.append(path)
                trainer.warn_once(f"an old checkpoint can't be removed, which will be tried again: {error}")

    def _can_link(self, trainer: Trainer, path: str) -> bool:
        """Whether ``last`` can be a second name of what is saved at ``path``, rather than a second save."""
        features = trainer.strategy.checkpoint_io.features
        return not is_url(path) and ("sharded" not in features or "links" in features)

    def _link(self, trainer: Trainer, path: str, last: str) -> bool:
        """Make ``last`` a second name of what is at ``path`` and durable; False when a second save must do."""
        return bool(self._agree(trainer, lambda: trainer.strategy.checkpoint_io.link_checkpoint(path, last)))

    def _agree(self, trainer: Trainer, decide: Any) -> Any:
        """Rank 0's decision on every rank; an error of it too."""
        strategy = trainer.strategy
        if strategy.world_size == 1:
            return decide()
        error: Exception | None = None
        decision = None
        if trainer.is_global_zero:
            try:
                decision = decide()
            except Exception as raised:
                error = raised
        decision, failure = strategy.broadcast((decision, None if error is None else str(error)))
        if error is not None:
            raise error
        if failure is not None:
            raise ConfigurationError(failure)
        return decision

    # -- names -------------------------------------------------------------------------------------------------------

    def _pattern(self) -> str:
        return self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"

    def _values(self, trainer: Trainer) -> dict[str, Any]:
        return {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """The path a checkpoint with these values has, as its ``ver``-th version."""
        name = fill_pattern(
            filename or self._pattern(),
            metrics,
            insert_names=self.auto_insert_metric_name,
            equals=self.CHECKPOINT_EQUALS_CHAR,
        )
        version = "" if ver is None else f"{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        return join(self.dirpath or "", f"{name}{version}{self.FILE_EXTENSION}")

    def _free_path(self, trainer: Trainer, pattern: str, replaced: set[str | None]) -> str:
        """A path nobody has: not another run, and not what this one keeps beside what is ``replaced``. On rank 0."""
        values = self._values(trainer)
        path = self.format_checkpoint_name(values, pattern)
        if not self._files.hold(path):
            trainer.warn_once(
                f"ModelCheckpoint saves in {os.path.dirname(path)!r} as a run of its own from here on, and no longer "
                "deletes what it has saved there: another process has gone on as the run of this one, which had not "
                f"renewed its file there for {EXPIRES_S:g} s or longer. Let only one of the two go on"
            )
        if not self.enable_version_counter:
            self._check_replaceable(trainer, path)
            self._files.claim(path, force=True)
            return path
        version = self.STARTING_VERSION
        kept = self._own() - replaced
        while path in kept or not self._files.claim(path):
            path = self.format_checkpoint_name(values, pattern, version)
            version += 1
        return path

    def _check_replaceable(self, trainer: Trainer, path: str) -> None:
        if self._files.is_taken(path) and not trainer.strategy.checkpoint_io.exists(path):
            raise CheckpointError(
                f"{path!r} is there and is no checkpoint, so it is not overwritten: move it away, choose another "
                "'filename', or leave out enable_version_counter=False, with which the new file gets another name"
            )

    def _own(self) -> set[str | None]:
        """The files of this run that are to stay."""
        return {path for path in (*self.best_k_models, self._newest, self.last_model_path, self._interrupted) if path}

    def _default_folder(self, trainer: Trainer) -> str:
        root = normal_folder(trainer.default_root_dir)
        if is_url(root) and trainer.log_dir is not None:  # the loggers are local: their names for the run, there
            experiment, run = os.path.split(trainer.log_dir)
            return f"{root}/{os.path.basename(experiment)}/{run}/checkpoints"
        return join(normal_folder(trainer.log_dir or root), "checkpoints")

    def candidate_folders(self, trainer: Trainer) -> list[str]:
        """Where checkpoints of this run, and of earlier ones, may lie; the most likely first. Every rank."""
        if self._given_dirpath is not None:
            return [self._given_dirpath]
        folder = self._default_folder(trainer)
        return [folder, *earlier_runs(folder)] if trainer.log_dir is not None else [folder]

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            filename=self.filename,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=str(self.train_time_interval),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"dirpath": self.dirpath, **self._snapshot()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; in another folder than before only the best so far is remembered, and nothing there is deleted."""
        state = _check_state(state_dict)
        if state.pop("dirpath") == self.dirpath:
            self._restore(state)
            return
        self._restore({name: state[name] for name in _STATE})
        if self.best_model_score is not None:
            self._inherited = (self.best_model_path, self.best_model_score)

    def _snapshot(self) -> dict[str, Any]:
        return {name: copy.copy(getattr(self, name)) for name in (*_STATE, *_STATE_OF_FOLDER)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, copy.copy(value))


def _check_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy; TypeError or KeyError, which names it, for a value that no ModelCheckpoint has."""
    for name in ("dirpath", "best_model_path", "last_model_path", "_newest", "_interrupted"):
        if not isinstance(state[name], str) and not (name == "dirpath" and state[name] is None):
            raise TypeError(f"{name!r} must be a str (got {state[name]!r})")
    for name in ("best_model_score", "current_score"):
        if state[name] is not None:
            check_score(name, state[name])
    best = state["best_k_models"]
    if not isinstance(best, Mapping) or not all(isinstance(path, str) for path in best):
        raise TypeError(f"'best_k_models' must be a dict from paths to scores (got {best!r})")
    for score in best.values():
        check_score("best_k_models", score)
    if not isinstance(state["_doomed"], list) or not all(isinstance(path, str) for path in state["_doomed"]):
        raise TypeError(f"'_doomed' must be a list of paths (got {state['_doomed']!r})")
    for name, kinds in (("_seen_at", (int, int)), ("_written_at", (int, int)), ("_inherited", (str, object))):
        pair = state[name]
        pairs = isinstance(pair, tuple | list) and len(pair) == 2 and all(map(isinstance, pair, kinds))
        if pair is not None and not pairs:
            raise TypeError(f"{name!r} must be a pair or None (got {pair!r})")
    if state["_inherited"] is not None:
        check_score("_inherited", state["_inherited"][1])
    return dict(state)


@dataclass(frozen=True)
class _Unsettled:
    """A save that may not be durable yet: what was known before it, its files, what to say and which link to make."""

    before: dict[str, Any]
    paths: tuple[str, ...]
    text: str = ""
    link: tuple[str, str] | None = None


def _pauses(trainer: Trainer, waiting: Iterable[Waiting]) -> Iterator[bool]:
    """True after each pause that is made while another run is waited for. On rank 0, which says so after the first."""
    longest_s = min(1.0, trainer.strategy.timeout.total_seconds() / 4)
    looks = Counter[str]()
    for run, folder, left in waiting:
        looks[folder] += 1
        if looks[folder] == 2:
            trainer.announce(
                f"fit waits for {math.ceil(left)} s at most to see whether run {run} in {folder!r} still lives, whose "
                "process was on another host and has not said that it ended"
            )
        time.sleep(min(left, longest_s))
        yield True


def _position(trainer: Any) -> tuple[int, int]:
    """Where training stands: optimizer steps and batches, as one step may be made of several batches."""
    return trainer.global_step, trainer.fit_loop.total_batches
