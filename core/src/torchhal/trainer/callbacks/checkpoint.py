"""Save checkpoints while training, and keep the best or the newest of them, with ModelCheckpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from torchhal._arguments import check_bool, check_count, check_optional_count
from torchhal.checkpoint._location import is_url
from torchhal.checkpoint.base import DEFAULT_EXTENSION
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.trainer._forwarded import Forwarded
from torchhal.trainer._shared_clock import SharedClock
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._checkpoint_files import check_writable, earlier_runs, join, normal_folder
from torchhal.trainer.callbacks._checkpoint_names import check_pattern, fill_pattern
from torchhal.trainer.callbacks._checkpoint_writer import CheckpointWriter, PendingSave
from torchhal.trainer.callbacks._kept_checkpoints import KeptCheckpoints, check_kept_state
from torchhal.trainer.callbacks._monitor import check_mode, check_monitor, missing_metric, validates_once_per_epoch
from torchhal.trainer.callbacks._rank_agreement import decide_on_rank_zero
from torchhal.trainer.callbacks._run_ownership import EXPIRES_S
from torchhal.trainer.callbacks._run_takeover import take_over_run
from torchhal.trainer.callbacks._written_files import WrittenFiles
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class ModelCheckpoint(Callback):
    """Callback that saves checkpoints while training, and keeps the best or the newest of them.

    Rank 0 decides what is saved and deleted, for all ranks. A file is deleted or replaced only when its
    successor is durable, and only if this run, or the one it resumes in the same folder, wrote it, which a record in
    the folder's ``.torchhal`` has to prove; any other file of that name is kept and the new file gets ``-v1``,
    ``-v2``, ... Nothing is saved in a sanity check or under ``fast_dev_run``. When a signal ends the run between two
    steps, one more checkpoint to resume from is written.

    Args:
        dirpath: the folder, or an fsspec URL; ``<log folder of the first logger>/checkpoints`` by default.
        filename: a pattern; ``{epoch}``, ``{step}`` and every logged name may stand in it. Default
            ``"{epoch}-{step}"``, which becomes ``epoch=0-step=64.ckpt``.
        monitor: the logged value by which checkpoints are ranked; None keeps the newest.
        verbose: print what was saved.
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
        enable_version_counter: False overwrites checkpoints of other runs; other files are kept.

    Attributes:
        best_model_path: the best checkpoint so far, or without ``monitor`` the newest; "" for none.
        best_model_score: its score; None without ``monitor``.
        best_k_models: the scores of the checkpoints that are kept, by path.
        current_score: the latest score.
        last_model_path: the ``last.ckpt``, or "".

    Raises:
        ConfigurationError, TypeError, ValueError: arguments outside their domain, or that exclude each other.
    """

    replaces = "checkpoint"

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = DEFAULT_EXTENSION
    """If a subclass sets another one, names end in it; else in the ``extension`` of the run's checkpoint IO."""

    STARTING_VERSION = 1

    runs_after_module = True
    """Changes that the model's own hook makes to weights, buffers or optimizers are in the file; at the end of an epoch
    all values are logged."""

    best_model_path = Forwarded[str]("_kept")
    best_model_score = Forwarded["torch.Tensor | None"]("_kept")
    best_k_models = Forwarded["dict[str, torch.Tensor]"]("_kept")
    current_score = Forwarded["torch.Tensor | None"]("_kept")
    last_model_path = Forwarded[str]("_kept")

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
        self._kept = KeptCheckpoints()
        self._writer = CheckpointWriter()
        self._step_seen = 0
        self._validated = False
        self._io_extension = DEFAULT_EXTENSION

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
        """Choose the folder, and check on rank 0 that it can be written to; nothing is created yet."""
        self.dirpath = self._given_dirpath or self._default_folder(trainer)
        self._validated = False
        self._io_extension = trainer.strategy.checkpoint_io.extension
        storage_options = trainer.strategy.checkpoint_io.storage_options
        self._writer.files = WrittenFiles(trainer.run_id, self.state_key, storage_options)
        if stage == "fit" and self._saves(trainer):
            folder = self.dirpath
            decide_on_rank_zero(trainer, lambda: check_writable(folder, storage_options))

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Store, before a fit, the run that wrote this checkpoint, if it is in the same folder."""
        path = normal_folder(trainer.ckpt_path or "")
        if trainer.state.fn == "fit" and os.path.dirname(path) == self.dirpath and trainer.is_global_zero:
            self._writer.files.continues(path)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if next(iter(_own(trainer)), None) is self:
            callbacks = [callback for callback in _own(trainer) if callback._saves(trainer)]
            # Not before: a run whose checkpoint is refused is not taken over.
            take_over_run(trainer, [(callback._writer.files, callback.dirpath or "") for callback in callbacks])
        self._step_seen = trainer.global_step
        # A checkpoint without a state of this callback may set training back: what is then trained again is saved
        # again.
        position = _position(trainer)
        if self._kept.seen_at != position:
            self._kept.seen_at = None
        if self._kept.written_at != position:
            self._kept.written_at = None
        if self.train_time_interval is not None:
            self._clock.start(trainer.global_step)

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
        self._writer.files.let_go()

    @property
    def interrupted_path(self) -> str:
        """The file from which a run ended by a signal continues; empty without one."""
        return self._kept.interrupted or (self.last_model_path if self.save_last else self._writer.durable_path)

    def save_interrupted(self, trainer: Trainer) -> None:
        """Save a state to resume from, when a signal ends the run. Every rank must call."""
        if not self._saves(trainer) or trainer.sanity_checking:
            return
        others = [callback for callback in _own(trainer) if callback.dirpath == self.dirpath]
        if others and others[0] is not self:
            return  # one file in a folder is enough
        self._settle(trainer)
        kept, writer = self._kept, self._writer
        if kept.written_at == _position(trainer) and not self.save_weights_only:
            return
        pattern = self.CHECKPOINT_NAME_LAST if self.save_last else "interrupted-{epoch}-{step}"
        path = decide_on_rank_zero(
            trainer, lambda: self._free_path(trainer, pattern, {kept.last_model_path, kept.interrupted})
        )
        before = kept.copy()
        kept.replace("last_model_path" if self.save_last else "interrupted", path)
        kept.written_at = _position(trainer)
        with writer.undone_on_failure(trainer, kept, before, (path,)):
            trainer.save_checkpoint(path)
        writer.pending = PendingSave(before, (path,))
        self._settle(trainer)

    # -- saving ------------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, *, top_k: bool) -> None:
        """Save what is due at this position of training, once. Every rank must call at the same steps."""
        if trainer.fast_dev_run or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        kept, writer, position = self._kept, self._writer, _position(trainer)
        if position == kept.seen_at:
            return
        self._settle(trainer)
        trainer.results.share_steps()
        path, score, evicted, last = decide_on_rank_zero(trainer, lambda: self._decide(trainer, top_k))
        paths = tuple(each for each in (path, last) if each is not None)
        before = kept.copy()
        kept.seen_at = position
        if score is not None:
            kept.current_score = torch.tensor(score, dtype=torch.float64)
        if not paths:
            return
        with writer.undone_on_failure(trainer, kept, before, paths):
            kept.written_at = position
            kept.replace("interrupted", "")
            if last is not None:
                kept.replace("last_model_path", last)
            if path is not None:
                self._keep(path, evicted)
            link = writer.save(trainer, path, last, self.save_weights_only)
        text = f"saved {path or last}" + (f" ({self.monitor}={score:.6g})" if score is not None else "")
        writer.pending = PendingSave(before, paths, text if self.verbose else "", link)
        if "async" not in trainer.strategy.checkpoint_io.features:
            self._settle(trainer)

    def _decide(self, trainer: Trainer, top_k: bool) -> tuple[str | None, float | None, str | None, str | None]:
        """Return, on rank 0, the new file, its score, the file it replaces and the new ``last``, each or None."""
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
                save, evicted = self._kept.place(score, self.mode, self.save_top_k)
        elif save and self.save_top_k == 1:
            evicted = self._kept.newest or None
        path = None
        if save:
            path = self._free_path(trainer, self._pattern(), {evicted})
        last = self._free_path(trainer, self.CHECKPOINT_NAME_LAST, {self.last_model_path}) if self.save_last else None
        return path, score, evicted, last

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the checkpoints that are kept for their scores, the next to be deleted."""
        return self._kept.worst(self.mode)

    def _keep(self, path: str, evicted: str | None) -> None:
        if self.monitor is None:
            self._kept.keep_newest(path, evicted, all_kept=self.save_top_k != 1)
        else:
            self._kept.keep_scored(path, evicted, monitor=self.monitor, mode=self.mode)

    def _settle(self, trainer: Trainer) -> None:
        """Wait until the latest save is durable, delete what it supersedes, and notify the loggers. Every rank."""
        saved = self._writer.settle(trainer, self._kept)
        if saved is None:
            return
        trainer.call_loggers("after_save_checkpoint", self)
        if saved.text:
            trainer.print(saved.text)

    # -- names -------------------------------------------------------------------------------------------------------

    def _pattern(self) -> str:
        return self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"

    def _values(self, trainer: Trainer) -> dict[str, Any]:
        return {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path of a checkpoint.

        Args:
            metrics: the values that the pattern names.
            filename: the pattern; None for that of this callback.
            ver: the number appended to the name; None for no number.
        """
        name = fill_pattern(
            filename or self._pattern(),
            metrics,
            insert_names=self.auto_insert_metric_name,
            equals=self.CHECKPOINT_EQUALS_CHAR,
        )
        version = "" if ver is None else f"{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        extension = self._io_extension if self.FILE_EXTENSION == DEFAULT_EXTENSION else self.FILE_EXTENSION
        return join(self.dirpath or "", f"{name}{version}{extension}")

    def _free_path(self, trainer: Trainer, pattern: str, replaced: set[str | None]) -> str:
        """Return a path that no other run has and this one keeps no file at, except ``replaced``. On rank 0."""
        values = self._values(trainer)
        path = self.format_checkpoint_name(values, pattern)
        if not self._writer.files.hold(path):
            trainer.warn_once(
                f"ModelCheckpoint saves in {os.path.dirname(path)!r} as a run of its own from here on, and no longer "
                "deletes what it has saved there: another process has gone on as the run of this one, which had not "
                f"renewed its file there for {EXPIRES_S:g} s or longer. Let only one of the two go on"
            )
        if not self.enable_version_counter:
            self._check_replaceable(trainer, path)
            self._writer.files.claim(path, force=True)
            return path
        version = self.STARTING_VERSION
        kept = self._kept.paths - replaced
        while path in kept or not self._writer.files.claim(path):
            path = self.format_checkpoint_name(values, pattern, version)
            version += 1
        return path

    def _check_replaceable(self, trainer: Trainer, path: str) -> None:
        if self._writer.files.is_taken(path) and not trainer.strategy.checkpoint_io.exists(path):
            raise CheckpointError(
                f"{path!r} is there and is no checkpoint, so it is not overwritten: move it away, choose another "
                "'filename', or leave out enable_version_counter=False, with which the new file gets another name"
            )

    def _default_folder(self, trainer: Trainer) -> str:
        root = normal_folder(trainer.default_root_dir)
        if is_url(root) and trainer.log_dir is not None:  # the loggers are local: their names for the run, there
            experiment, run = os.path.split(trainer.log_dir)
            return f"{root}/{os.path.basename(experiment)}/{run}/checkpoints"
        return join(normal_folder(trainer.log_dir or root), "checkpoints")

    def candidate_folders(self, trainer: Trainer) -> list[str]:
        """Return the folders in which checkpoints of this run, and of earlier ones, may lie; the most likely first."""
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
        return {"dirpath": self.dirpath, **self._kept.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; in another folder than before only the best so far is remembered, and nothing there is deleted."""
        check_kept_state(state_dict)
        # A new object, since the Trainer undoes a load by giving the callback its attributes back.
        self._kept = self._kept.resumed(state_dict, same_folder=state_dict["dirpath"] == self.dirpath)


def _position(trainer: Any) -> tuple[int, int]:
    """Return the optimizer steps and batches so far, both since one step may be made of several batches."""
    return trainer.global_step, trainer.fit_loop.total_batches


def _own(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the ModelCheckpoints of this class: others may save for another framework."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
