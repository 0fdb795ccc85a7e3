"""Define the base of loggers for experiment services: what is logged waits in a file, and a thread sends it."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torchhal.errors import ConfigurationError, TorchhalError, message_of
from torchhal.plugin import Availability
from torchhal.trainer.loggers import FolderLogger, NullExperiment, as_dict, is_rank_zero
from torchhal.vendor_package import VendorPackage, availability_from
from torchhal_loggers._media import figure_png, image_png
from torchhal_loggers._outbox import Outbox, Record
from torchhal_loggers._sender import Sender
from torchhal_loggers._values import plain

if TYPE_CHECKING:
    from torchhal.trainer.callbacks import ModelCheckpoint

_ON_ERROR: Final = ("warn", "raise")
_AFTER_A_FAILURE_S: Final = 5.0


class ServiceError(TorchhalError, RuntimeError):
    """A service doesn't answer, or refuses what it is sent, and the logger was asked to raise."""


class ServiceLogger(FolderLogger):
    """Base class of loggers that send what they are given to a service.

    Each record is written to ``save_dir/name/version_N/<service>/records.jsonl`` first, and a thread sends it from
    there: no step waits for the service. While the service is away, records wait; they are sent when it is back, by the
    next run with the same ``version``, or by ``torchhal send-logs FOLDER``. So nothing that a log method has returned
    from is lost, not even by a kill.

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
        super().__init__(save_dir, name, version)
        self.package.check()
        if not isinstance(prefix, str):
            raise TypeError(f"'prefix' must be a str (got {prefix!r})")
        if log_model not in (True, False, "all"):
            raise ValueError(f"'log_model' must be True, False or 'all' (got {log_model!r})")
        if on_error not in _ON_ERROR:
            raise ValueError(f"'on_error' must be 'warn' or 'raise' (got {on_error!r})")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
            raise ValueError(f"'timeout' must be a number of seconds (got {timeout!r})")
        self._prefix = f"{prefix}-" if prefix else ""
        self._log_model = log_model
        self._on_error = on_error
        self._timeout = float(timeout)
        self._best: tuple[str, Any] | None = None
        self.check_credentials()
        self._start_in_process()

    def _start_in_process(self) -> None:
        """Forget what belongs to another process: files, threads and connections."""
        self._process = os.getpid()
        self._outbox: Outbox | None = None
        self._sender: Sender | None = None
        self._experiment: Any = None
        self._connecting = threading.RLock()
        self._said_failure = False
        self._waits = False
        self._notes: list[str] = []
        self._said_notes = 0
        self._refused: dict[str, str] = {}
        self._checkpoints: dict[str, str] = {}  # what was reported, with what it was reported as

    @classmethod
    def availability(cls) -> Availability:
        return availability_from(cls.package.check)

    # -- of a subclass -----------------------------------------------------------------------------------------

    def connect(self) -> Any:
        """Begin the run at the service, or go on with that of :meth:`remembered`, and return its object.

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
                (:meth:`is_refusal`), and is sent them one by one.
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

        With these, and with ``save_dir`` and ``version``, ``torchhal send-logs`` makes the logger again, in a process
        that knows nothing else of the run.
        """
        return {}

    def remembered(self) -> dict[str, Any]:
        """Return what was given to :meth:`remember`, by an earlier process too; empty at first."""
        try:
            state = json.loads(self._state_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def remember(self, **state: Any) -> None:
        """Keep plain data, such as the id of the run at the service, in the run's folder."""
        self._state_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._state_path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**self.remembered(), **state}), encoding="utf-8")
        os.replace(temporary, self._state_path)

    @property
    def service_dir(self) -> Path:
        """The folder of what this logger keeps of a run."""
        return Path(self.log_dir, self.service)

    @property
    def run_name(self) -> str:
        """What people see as the run's name at the service, where they chose none."""
        return os.path.basename(self.log_dir)

    @property
    def _state_path(self) -> Path:
        return self.service_dir / "run.json"

    # -- of the Trainer and the user ---------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The object of the service's library; on ranks other than 0 one that ignores every call.

        Raises:
            ServiceError: the service doesn't answer.
        """
        if not is_rank_zero():
            return NullExperiment()
        try:
            return self.connected()
        except Exception as error:
            raise ServiceError(f"{self.service} can't be reached: {message_of(error)}") from error

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
        callback = checkpoint_callback
        self._best = (callback.best_model_path, callback.best_model_score)
        if self._log_model == "all":
            for path in filter(None, (callback.best_model_path, callback.last_model_path)):
                self._report_checkpoint(path, path == callback.best_model_path, callback.current_score)
        self.save()

    def save(self) -> None:
        """Make what was logged survive a failure of this machine; the service may get it later."""
        if self._outbox is not None and self._process == os.getpid():
            try:
                self._outbox.sync()
            except OSError as error:
                self._fail(f"{error}")
        self._report()

    def finalize(self, status: str) -> None:
        """Send what is left, for ``timeout`` seconds at most; for five where a run fails, whose end others wait for."""
        if not is_rank_zero() or self._outbox is None or self._process != os.getpid():
            return
        if self._log_model is True and self._best is not None and self._best[0]:
            self._report_checkpoint(self._best[0], True, self._best[1])
        self.save()
        self._drain(status)

    def _drain(self, status: str) -> None:
        sender = self._thread_of_sender()
        timeout = self._timeout if status == "success" else min(self._timeout, _AFTER_A_FAILURE_S)
        self._waits = not sender.drain(timeout, status)
        if self._waits and sender.failure is None:
            self._fail(f"has not taken everything within {timeout:g} s (timeout=...). {self._what_to_do()}")
        self._report()

    # -- records -----------------------------------------------------------------------------------------------

    def _append(self, kind: str, values: Any, step: int | None = None) -> None:
        if not is_rank_zero():
            return
        if self._process != os.getpid():
            self._start_in_process()
        record: Record = {kind: values, "time": time.time()}
        if kind not in {"params", "checkpoint"}:
            record["step"] = step
        try:
            if self._outbox is None:
                self._outbox = self._open_outbox()
            self._outbox.append(record)
        except OSError as error:
            self._fail(f"can't be sent what is logged, as it can't be written to {str(self.service_dir)!r}: {error}")
            return
        self._waits = False
        self._thread_of_sender().wake()
        self._report()

    def _open_outbox(self) -> Outbox:
        outbox = Outbox(self.service_dir)
        self.remember(logger=f"{type(self).__module__}:{type(self).__qualname__}", options=self.options())
        return outbox

    def _append_png(self, pictures: Mapping[str, bytes], step: int | None) -> None:
        if self._process != os.getpid():
            self._start_in_process()
        folder = self.service_dir / "images"
        paths = {}
        for key, content in pictures.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{time.time_ns()}.png"
                path.write_bytes(content)
            except OSError as error:
                self._fail(f"can't be sent an image, which can't be written: {error}")
                return
            paths[self._prefix + key] = str(path)
        self._append("image", paths, step)

    def _report_checkpoint(self, path: str, is_best: bool, score: Any) -> None:
        stamp = f"{is_best} {_changed(path)}"
        if self._checkpoints.get(path) != stamp:
            self._checkpoints[path] = stamp
            score = None if score is None else float(score)
            self._append("checkpoint", {"path": os.path.abspath(path), "is_best": is_best, "score": score})

    # -- the service -------------------------------------------------------------------------------------------

    def connected(self) -> Any:
        """Return what :meth:`connect` returned, which is called once per process."""
        with self._connecting:
            if self._process != os.getpid():
                self._start_in_process()
            if self._experiment is None:
                self.package.load()
                self._experiment = self.connect()
                self._at_exit()  # an exit runs the newest first: this, and then what the library has registered
            return self._experiment

    def disconnected(self) -> None:
        """Let the next use connect again; for :meth:`end`, where the library's object can't be used any more."""
        self._experiment = None

    @property
    def was_connected(self) -> bool:
        """True if this process has connected."""
        return self._experiment is not None

    def _thread_of_sender(self) -> Sender:
        if self._sender is None:
            assert self._outbox is not None
            self._sender = Sender(self, self._outbox)
            self._at_exit()
        return self._sender

    def _at_exit(self) -> None:
        atexit.register(_send_rest, weakref.ref(self), os.getpid())

    def _fail(self, what: str) -> None:
        text = f"{self.service} {what}"
        if self._on_error == "raise":
            raise ServiceError(text)
        if not self._said_failure:
            self._said_failure = True
            warnings.warn(f"{text}. Training goes on without it", UserWarning, stacklevel=2)

    def _what_to_do(self) -> str:
        return (
            f"What is logged waits in {str(self.service_dir)!r}, and is sent as soon as {self.service} answers, by a "
            f"later run with version={self.version!r}, or by 'torchhal send-logs {self.service_dir}'"
        )

    def note(self, text: str) -> None:
        """Have something about the service's records said, with its name before it, once; from any thread."""
        if text not in self._notes:
            self._notes.append(text)

    def _report(self) -> None:
        """Say once that the service is away, and each note."""
        sender = self._sender
        if sender is not None and sender.failure is not None and not self._said_failure:
            self._fail(f"can't be reached ({message_of(sender.failure)}). {self._what_to_do()}")
        if self._refused and self._on_error == "raise":
            raise ServiceError(f"{self.service} has refused {next(iter(self._refused.values()))}")
        while self._said_notes < len(self._notes):
            text = f"{self.service} {self._notes[self._said_notes]}"
            self._said_notes += 1
            warnings.warn(text, UserWarning, stacklevel=2)

    def refuse(self, record: Record, error: Exception) -> None:
        """Note that the service refused a record for good, and why; the first of its kind is said.

        Raises:
            ServiceError: it is asked for, with ``on_error="raise"``, from the next call of the logger.
        """
        kind = next((key for key in record if key not in {"step", "time"}), "record")
        if kind not in self._refused:
            self._refused[kind] = f"{kind} {str(record.get(kind))[:200]}: {message_of(error)}"
            if self._on_error == "warn":
                self.note(f"has refused {self._refused[kind]}. The rest is sent without it")

    def send_kept(self, timeout: float) -> int:
        """Send what an earlier process couldn't, and return how many records the service still doesn't have.

        Args:
            timeout: how many seconds to wait at most.
        """
        self._timeout = timeout
        self._outbox = Outbox(self.service_dir)
        if not self._outbox.is_empty:
            self._drain("success")
        return self._outbox.count_unsent()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which connects by itself: files and threads stay with this process."""
        state = super().__getstate__()
        for name in ("_outbox", "_sender", "_experiment", "_connecting"):
            state[name] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_in_process()


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _send_rest(logger: weakref.ref[ServiceLogger], pid: int) -> None:
    found = logger()
    if found is None or os.getpid() != pid or found._outbox is None or found._waits:
        return
    if not found._outbox.is_empty:
        found._on_error = "warn"  # nobody is left who could be told otherwise
        found._drain("interrupted")


def check_name(argument: str, value: Any) -> str:
    """Return ``value`` where it is a name.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{argument!r} must be a name (got {value!r})")
    return value
