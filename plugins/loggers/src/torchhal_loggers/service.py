"""Define the base of loggers for experiment services: what is logged waits in a file, and a thread sends it."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torchhal.errors import ConfigurationError, message_of
from torchhal.plugin import Availability
from torchhal.trainer.loggers import FolderLogger, NullExperiment, as_dict, is_rank_zero
from torchhal.vendor_package import VendorPackage, availability_from
from torchhal_loggers._checkpoint_reports import CheckpointReport, CheckpointReports
from torchhal_loggers._media import figure_png, image_png
from torchhal_loggers._messages import Messages
from torchhal_loggers._options import folder_of
from torchhal_loggers._outbox import Outbox, Record
from torchhal_loggers._run_state import RunState
from torchhal_loggers._sender import Sender
from torchhal_loggers._values import plain

if TYPE_CHECKING:
    from torchhal.trainer.callbacks import ModelCheckpoint

_AFTER_A_FAILURE_S: Final = 5.0
_CONNECT_AGAIN_S: Final = 30.0


class ServiceLogger(FolderLogger):
    """Base class of loggers that send what they are given to a service.

    Each record is written to ``save_dir/name/version_N/<service>/records.jsonl`` first, and a thread sends it from
    there: no step waits for the service. While the service is away, records wait; they are sent when it is back, by the
    next run with the same ``version``, or by ``torchhal sync-logs FOLDER``. So nothing that a log method has returned
    from is lost, not even by a kill; what was on its way at that moment may come twice.

    A subclass names its ``service`` and ``package`` and defines :meth:`connect`, :meth:`send` and :meth:`end`, which
    are called in the thread. A record is a dict with one of these keys, beside ``"time"`` (seconds since 1970) and,
    except for the last two, ``"step"`` (None where there is none):

    - ``"metrics"``: numbers by name;
    - ``"text"``, ``"image"``: texts, or paths of PNG files, by name;
    - ``"params"``: hyperparameters, nested dicts and lists of plain values;
    - ``"checkpoint"``: ``path``, ``is_best`` and ``score`` of one.

    Args:
        save_dir: the folder of all experiments; by default that of the process.
        name: the experiment.
        version: the run, a number or a name; None for a new one. A run with the version of an earlier one goes on in
            that one's run at the service.
        prefix: put before every metric's name, with a dash.
        log_model: send checkpoints: True for the best one when a fit ends, ``"all"`` for each that is saved.
        on_error: ``"warn"`` once and go on, or ``"raise"`` ServiceError from the next call of the logger.
        timeout: how many seconds the end of a fit or of the program waits at most for the service.
    """

    service: ClassVar[str]
    """Its name, in messages and of the folder."""

    package: ClassVar[VendorPackage]
    """The library that speaks to it."""

    interval_s: ClassVar[float] = 1.0
    """How long the thread collects records before it sends them."""

    writes_at_end: ClassVar[bool] = False
    """True if the library keeps what it is given in memory until :meth:`end`."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = ".",
        name: str | None = "torchhal_logs",
        version: int | str | None = None,
        *,
        prefix: str = "",
        log_model: bool | str = False,
        on_error: str = "warn",
        timeout: float = 30.0,
    ) -> None:
        super().__init__(save_dir, folder_of(name) if isinstance(name, str) else name, version, on_error=on_error)
        self.package.check()
        if not isinstance(prefix, str):
            raise TypeError(f"'prefix' must be a str (got {prefix!r})")
        if log_model not in (True, False, "all"):
            raise ValueError(f"'log_model' must be True, False or 'all' (got {log_model!r})")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
            raise ValueError(f"'timeout' must be a number of seconds (got {timeout!r})")
        self._experiment_name = name or ""
        self._prefix = f"{prefix}-" if prefix else ""
        self._log_model = log_model
        self._timeout = float(timeout)
        self._folder: Path | None = None  # of this logger's files, where it isn't that of the version
        self.check_credentials()
        self._start_in_process()

    def _start_in_process(self) -> None:
        """Forget what belongs to another process: files, threads and connections."""
        self._process = os.getpid()
        self._outbox: Outbox | None = None
        self._sender: Sender | None = None
        self._experiment: Any = None
        self._connecting = threading.RLock()
        self._connect_again = 0.0  # by the clock, for the user's calls
        self._messages = Messages(self.service, self.on_error)
        self._status: str | None = None  # with which the last call of the Trainer ended
        self._is_ended = True  # and nothing was logged since
        self._is_away = False  # the end has waited for the service in vain
        self._at_exit: Any = None
        self._checkpoints = CheckpointReports(self._log_model)

    @classmethod
    def availability(cls) -> Availability:
        return availability_from(cls.package.check)

    @property
    def name(self) -> str:
        return self._experiment_name

    # -- of a subclass -----------------------------------------------------------------------------------------

    def connect(self) -> Any:
        """Begin the run at the service, or go on with that of :meth:`run_state`, and return its object.

        Raises:
            Exception: the service doesn't answer; this is called again after a while.
        """
        raise NotImplementedError(f"{type(self).__name__} must define connect()")

    def send(self, experiment: Any, records: Sequence[Record]) -> None:
        """Hand records to the service, and return when they would survive a kill of this process.

        Args:
            experiment: what :meth:`connect` returned.
            records: in the order of their calls.

        Raises:
            Exception: the service doesn't answer, and is sent all of them again later; or it refuses one
                (:meth:`is_refusal`), and is sent them one by one. One that fails again and again where those behind it
                go through is passed over, as one that is refused.
        """
        raise NotImplementedError(f"{type(self).__name__} must define send(experiment, records)")

    def end(self, experiment: Any, status: str) -> None:
        """Let the service know that a call of the Trainer has ended; more records may follow.

        Args:
            experiment: what :meth:`connect` returned.
            status: ``"success"``, ``"failed"`` or ``"interrupted"``.
        """

    def is_refusal(self, error: Exception) -> bool:
        """Return whether ``error`` says that the service will never take the record; by default for none."""
        return False

    def check_credentials(self) -> None:
        """Look, in the constructor, whether there is what the service wants to see, without asking it.

        Raises:
            ConfigurationError: there is none.
        """

    def options(self) -> dict[str, Any]:
        """Return arguments of the constructor, as plain data and without secrets.

        With these ``torchhal sync-logs`` makes the logger again, in a process that knows nothing else of the run.
        """
        return {}

    def run_state(self) -> dict[str, Any]:
        """Return what was given to :meth:`update_run_state`, by an earlier process too; empty at first."""
        return RunState(self.service_dir / "run.json").read()

    def update_run_state(self, **values: Any) -> None:
        """Keep plain data, such as the id of the run at the service, in the run's folder.

        Raises:
            OSError: it can't be written.
        """
        RunState(self.service_dir / "run.json").update(**values)

    @property
    def service_dir(self) -> Path:
        """The folder of what this logger keeps of a run."""
        return self._folder or Path(self.log_dir, self.service)

    @property
    def run_name(self) -> str:
        """What people see as the run's name at the service, where they chose none."""
        return str(self.run_state().get("run_name") or os.path.basename(self.log_dir))

    def disconnect(self) -> None:
        """Let the next use connect again; for :meth:`end`, where the library's object can't be used any more."""
        self._experiment = None

    @property
    def is_connected(self) -> bool:
        """True if this process has an object of the library."""
        return self._experiment is not None and self._process == os.getpid()

    @property
    def is_ended(self) -> bool:
        """True if nothing was logged since the last call of the Trainer has ended, and the service has everything."""
        return self._is_ended and (self._outbox is None or self._outbox.is_empty)

    def warn_later(self, text: str) -> None:
        """Have something about the service's records said, with its name before it, once; from any thread."""
        self._messages.add(text)

    # -- of the Trainer and the user ---------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The object of the service's library, which ignores every call on other ranks and while the service is away.

        Raises:
            ServiceError: the service doesn't answer, and ``on_error`` is ``"raise"``.
        """
        if not is_rank_zero() or time.monotonic() < self._connect_again:
            return NullExperiment()
        try:
            return self.get_experiment()
        except Exception as error:
            self._connect_again = time.monotonic() + _CONNECT_AGAIN_S
            self._messages.fail(f"can't be reached ({message_of(error)})")
            return NullExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._append("metrics", {self._prefix + str(name): float(value) for name, value in metrics.items()}, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if values := plain(as_dict(params)):
            self._append("params", values)

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        self._append("text", {self._prefix + key: str(text)}, step)

    def log_image(self, key: str, images: Any, step: int | None = None) -> None:
        if not is_rank_zero():
            return
        several = list(images) if isinstance(images, list | tuple) else [images]
        names = [f"{key}/{number}" if len(several) > 1 else key for number in range(len(several))]
        self._append_png({name: image_png(image) for name, image in zip(names, several, strict=True)}, step)

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        if is_rank_zero():
            self._append_png({key: figure_png(figure)}, step)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        for report in self._checkpoints.after_save(checkpoint_callback):
            self._append_checkpoint(report)
        self.save()

    def save(self) -> None:
        """Make what was logged survive a failure of this machine; the service may get it later."""
        self._sync()
        self._report()

    def finalize(self, status: str) -> None:
        """Send what is left, for ``timeout`` seconds at most; for five where a run fails, whose end others wait for."""
        if not is_rank_zero() or self._outbox is None or self._process != os.getpid():
            return
        for report in self._checkpoints.at_end():
            self._append_checkpoint(report)
        if not self._is_ended or status != self._status:
            self._write({"status": status, "time": time.time()})
        self._is_ended, self._status = True, status
        self._sync()
        self._drain(self._longest_wait(status))
        self._outbox.close()

    def _longest_wait(self, status: str) -> float:
        return self._timeout if status == "success" else min(self._timeout, _AFTER_A_FAILURE_S)

    def _sync(self) -> None:
        if self._outbox is not None and self._process == os.getpid():
            try:
                self._outbox.sync()
            except OSError as error:
                self._messages.fail(f"{error}")

    def _drain(self, timeout: float) -> None:
        assert self._outbox is not None
        sender = self._thread_of_sender()
        self._is_away = not sender.drain(timeout)
        if self._is_away and sender.failure is None:
            self._messages.fail(f"has not taken everything within {timeout:g} s (timeout=...). {self._what_to_do()}")
        self._report()

    # -- records -----------------------------------------------------------------------------------------------

    def _append(self, kind: str, values: Any, step: int | None = None) -> None:
        if not is_rank_zero():
            return
        record: Record = {kind: values, "time": time.time()}
        if kind not in {"params", "checkpoint"}:
            record["step"] = None if step is None else int(step)
        if self._write(record):
            self._is_ended = self._is_away = False
            self._report()

    def _write(self, record: Record) -> bool:
        """Write a record to the outbox; return whether that could be done."""
        try:
            self._open_outbox().append(record)
        except OSError as error:
            self._messages.fail(
                f"can't be sent what is logged, as it can't be written to {str(self.service_dir)!r}: {error}"
            )
            return False
        self._thread_of_sender().wake()
        return True

    def _check_process(self) -> None:
        if self._process != os.getpid():  # forked
            self._start_in_process()

    def reserve(self) -> None:
        try:
            super().reserve()
        except ConfigurationError as error:  # the training goes on
            self._messages.fail(f"can't be sent what is logged: {message_of(error)}")

    def _open_outbox(self) -> Outbox:
        self._check_process()
        if self._outbox is None:
            if self._folder is None:
                self.reserve()
            kind = f"{type(self).__module__}:{type(self).__qualname__}"
            self.update_run_state(logger=kind, options=self.options(), run_name=self.run_name)
            self._outbox = Outbox(self.service_dir)
        return self._outbox

    def _append_png(self, pictures: Mapping[str, bytes], step: int | None) -> None:
        paths = {}
        for key, content in pictures.items():
            path = Path("images", f"{time.time_ns()}.png")
            try:
                self._open_outbox()
                (self.service_dir / "images").mkdir(parents=True, exist_ok=True)
                (self.service_dir / path).write_bytes(content)
            except OSError as error:
                self._messages.fail(f"can't be sent an image, which can't be written: {error}")
                return
            paths[self._prefix + key] = path.as_posix()
        self._append("image", paths, step)

    def with_absolute_paths(self, record: Record) -> Record:
        """Return a record of the file, whose pictures are named from the run's folder, as :meth:`send` has it."""
        if "image" not in record:
            return record
        return {**record, "image": {key: str(self.service_dir / path) for key, path in record["image"].items()}}

    def _append_checkpoint(self, report: CheckpointReport) -> None:
        self._append("checkpoint", {**report._asdict(), "path": os.path.abspath(report.path)})

    # -- the service -------------------------------------------------------------------------------------------

    def get_experiment(self) -> Any:
        """Return what :meth:`connect` returned, which is called once, or again after :meth:`disconnect`."""
        self._check_process()
        with self._connecting:
            if self._experiment is None:
                self.package.load()
                self._experiment = self.connect()
                self._register_exit()  # an exit runs the newest first: this, and then what the library has registered
            return self._experiment

    def _thread_of_sender(self) -> Sender:
        if self._sender is None:
            assert self._outbox is not None
            with suppress(Exception):  # the thread says it
                self.package.load()  # here, since a thread can't where the program ends meanwhile
            self._sender = Sender(self, self._outbox)
            self._register_exit()
        return self._sender

    def release(self) -> bool:
        """End the library's run, for another logger to begin one; return False while this one is sending.

        The next record goes on in it.
        """
        if not self.is_connected:
            return True
        if self._sender is not None and not self._sender.suspend():
            return False
        if self.is_connected:  # by the user, and nothing was logged
            self.end(self._experiment, "interrupted")
        return True

    def record_rejected(self, record: Record, error: BaseException) -> None:
        """Note that the service refused a record for good, and why."""
        self._messages.reject(record, error)

    def _report(self) -> None:
        """Say once that the service is away, and whatever else there is."""
        failure = self._sender.failure if self._sender is not None else None
        if failure is not None and not self._messages.said_failure:
            self._messages.fail(f"can't be reached ({message_of(failure)}). {self._what_to_do()}")
        self._messages.report()

    def _what_to_do(self) -> str:
        number = self._outbox.count_unsent() if self._outbox is not None else 0
        waits = f"{number} record{'s' * (number != 1)} wait{'s' * (number == 1)}" if number else "What is logged waits"
        return (
            f"{waits} in {str(self.service_dir)!r} until {self.service} answers, to be sent by this run, by one with "
            f"version={self.version!r}, or by 'torchhal sync-logs {self.service_dir}'"
        )

    @classmethod
    def from_folder(cls, folder: Path, options: Mapping[str, Any]) -> ServiceLogger:
        """Return a logger for a run of an earlier process.

        Args:
            folder: :attr:`service_dir` of that run's, wherever it is now.
            options: what :meth:`options` returned.
        """
        made = cls(**{**options, "save_dir": folder.parent.parent, "version": folder.parent.name})
        made._folder = folder.absolute()
        return made

    def send_pending(self, timeout: float) -> int:
        """Send what an earlier process couldn't, and return how many records the service still doesn't have.

        Args:
            timeout: how many seconds to wait at most.
        """
        self._outbox = Outbox(self.service_dir)
        if not self._outbox.is_empty:
            if self.writes_at_end and not self._outbox.ends_with_status():
                self._outbox.append({"status": "interrupted", "time": time.time()})
            self._drain(timeout)
        return self._outbox.count_unsent()

    # -- the end of the process --------------------------------------------------------------------------------

    def _register_exit(self) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._at_exit = functools.partial(_end_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def _end_in_time(self) -> None:
        """Send the rest, where nobody has called :meth:`finalize`."""
        if self._outbox is None or self._is_away:
            return
        self._messages.on_error = "warn"  # nobody is left who could be told otherwise
        if self._status is None:
            has_failed = getattr(sys, "last_value", None) is not None  # an exception has ended the program
            self._status = "failed" if has_failed else "success"
        if not self._is_ended:
            self._write({"status": self._status, "time": time.time()})
        if not self._outbox.is_empty:
            self._drain(self._longest_wait(self._status))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which connects by itself: files and threads stay with this process."""
        state = super().__getstate__()
        for name in ("_outbox", "_sender", "_experiment", "_connecting", "_messages", "_at_exit"):
            state[name] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_in_process()


def _end_at_exit(logger: weakref.ref[ServiceLogger], pid: int) -> None:
    found = logger()
    if found is not None and os.getpid() == pid:
        found._end_in_time()
