"""Define the contract of loggers, and the base of those that write into a folder per run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchhal.checkpoint._location import is_url
from torchhal.composition import Composable
from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    from torchhal.trainer.callbacks import ModelCheckpoint


def is_rank_zero() -> bool:
    """Return whether this process writes: rank 0 of the running job, or the only process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


class NullExperiment:
    """The experiment of a logger on ranks other than 0: its attributes and calls all do nothing.

    .. versionadded:: 0.2
    """

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class Logger(Composable):
    """Base class of loggers, which record the metrics and hyperparameters of a run.

    The Trainer calls the methods on rank 0 only, and reads the properties on every rank: neither they nor the
    constructor write anything, and a folder doesn't depend on the rank. A logger that can't write must raise an error:
    a run must not continue silently without its record. The Trainer names the logger and the error in a warning, once,
    and the run goes on; with :attr:`on_error` ``"raise"`` it ends.

    A logger changes nothing of what it is given, which the user and other loggers have too, nor the random numbers, the
    working folder and torch's settings of the process; it may wrap the standard streams while its run is open. Two
    objects share no records, unless they are of one run.
    """

    on_error: str = "warn"
    """What the Trainer does when a method raises: ``"warn"``, once per run, or ``"raise"``.

    .. versionadded:: 0.2
    """

    @property
    def name(self) -> str | None:
        """The experiment; None if it has no name."""
        return None

    @property
    def version(self) -> int | str | None:
        """The run within the experiment."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The folder of all experiments; None for a logger that writes elsewhere."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder of the experiment."""
        return self.save_dir

    @property
    def log_dir(self) -> str | None:
        """The folder of the run; checkpoints go below it by default."""
        return self.root_dir

    @property
    def experiment(self) -> Any:
        """The object of the logging library, which the user may write to directly."""
        return self

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record the numbers of one step, or of an epoch that ended at this step. Called on rank 0.

        Args:
            metrics: numbers by name, finite or not. The caller may change the mapping after the call.
            step: the optimizer steps done so far; None for metrics that belong to no step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define log_metrics(metrics, step)")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record the hyperparameters. Called on rank 0, before the first metrics.

        Args:
            params: a dict or a namespace, nested or not, with values of any type.
            *args: further arguments of a logging library; the Trainer passes none.
            **kwargs: the same.
        """

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Record a text; a logger with no place for texts leaves it out. The Trainer calls this never.

        Args:
            key: its name, as of a metric.
            text: the text, which some loggers show as Markdown.
            step: the optimizer steps done so far.

        .. versionadded:: 0.2
        """

    def log_image(self, key: str, images: Any, step: int | None = None) -> None:
        """Record an image or several; a logger with no place for images leaves them out. The Trainer calls this never.

        Args:
            key: its name, as of a metric.
            images: a tensor or an array of shape (channels, height, width) or (height, width), of ``uint8`` or of
                floats between 0 and 1, with 1, 3 or 4 channels; an image of PIL; or a list of these.
            step: the optimizer steps done so far.

        .. versionadded:: 0.2
        """

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Record a figure of matplotlib; a logger with no place for it leaves it out. The Trainer calls this never.

        Args:
            key: its name, as of a metric.
            figure: a ``matplotlib.figure.Figure``, which is left open.
            step: the optimizer steps done so far.

        .. versionadded:: 0.2
        """

    def save(self) -> None:
        """Write what is buffered. Called on rank 0."""

    def finalize(self, status: str) -> None:
        """Finish one call of the Trainer, which more may follow: what was logged is written then, whatever the status.

        Called on rank 0 when the call has ended.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``.
        """
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Record a durable checkpoint. Called on rank 0 after each save.

        Args:
            checkpoint_callback: the ModelCheckpoint that saved it.
        """


def as_dict(params: Any) -> dict[str, Any]:
    """Return hyperparameters, given as a dict or as a namespace, as a dict."""
    if isinstance(params, Mapping):
        return dict(params)
    if hasattr(params, "__dict__"):
        return dict(vars(params))
    raise TypeError(f"'params' must be a dict or a namespace (got {params!r})")


class FolderLogger(Logger):
    """Base class of loggers that write to ``save_dir/name/version_N``, which is created with the first write.

    Args:
        save_dir: the folder of all experiments; by default that of the process.
        name: the experiment; "" for none.
        version: the run: a number, which becomes ``version_N``, or a name; None for one more than the highest there.
        on_error: ``"warn"`` when something can't be written, and go on with the run, or ``"raise"``.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = ".",
        name: str | None = "torchhal_logs",
        version: int | str | None = None,
        *,
        on_error: str = "warn",
    ) -> None:
        if not isinstance(save_dir, str | os.PathLike):
            raise TypeError(f"'save_dir' must be a path (got {save_dir!r})")
        if is_url(os.fspath(save_dir)):
            raise ConfigurationError(
                f"'save_dir' must be a local folder: {type(self).__name__} appends to its files, which no object store "
                f"can (got {os.fspath(save_dir)!r})"
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"'name' must be a str or None (got {name!r})")
        if isinstance(version, bool) or not isinstance(version, int | str | None):
            raise TypeError(f"'version' must be an int, a str or None (got {version!r})")
        if isinstance(version, int) and version < 0:
            raise ValueError(f"'version' must be 0 or more (got {version})")
        if on_error not in ("warn", "raise"):
            raise ValueError(f"'on_error' must be 'warn' or 'raise' (got {on_error!r})")
        self.on_error = on_error
        self._save_dir = os.path.abspath(os.path.expanduser(os.fspath(save_dir)))
        self._name = name or ""
        self._version = version

    @property
    def name(self) -> str:
        return self._name

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self._save_dir, self._name) if self._name else self._save_dir

    @property
    def version(self) -> int | str:
        if self._version is None:
            self._version = self._next_version()
        return self._version

    @property
    def log_dir(self) -> str:
        version = self.version
        return os.path.join(self.root_dir, f"version_{version}" if isinstance(version, int) else version)

    def reserve(self) -> None:
        """Create this run's folder, so that a job started at the same moment takes the next one.

        The folder of a version that the user named may exist.

        Raises:
            ConfigurationError: it can't be created.
        """
        chosen = self._version is not None
        while True:
            folder = self.log_dir
            try:
                os.makedirs(folder, exist_ok=chosen)
            except FileExistsError:
                if chosen:
                    raise ConfigurationError(
                        f"{folder!r} must be a folder, for what {type(self).__name__} writes, but is a file"
                    ) from None
                self._version = None  # another process took this version
            except OSError as error:
                raise ConfigurationError(
                    f"{folder!r}, the folder of the run, can't be created ({error.strerror}): choose another "
                    "'default_root_dir' of the Trainer or 'save_dir' of the logger, or logger=False"
                ) from error
            else:
                return

    def join(self, other: FolderLogger) -> None:
        """Take the version of another logger of the same run, unless this one has one."""
        if self._version is None:
            self._version = other.version
        self.reserve()

    def _next_version(self) -> int:
        try:
            names = os.listdir(self.root_dir)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        used = [int(name[8:]) for name in names if name.startswith("version_") and name[8:].isdigit()]
        return max(used, default=-1) + 1

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which writes to the same run in another process."""
        _ = self.version
        return dict(self.__dict__)
