"""Every error torchhal raises on purpose, one tree.

::

    TorchhalError
    ├── PluginError                      something about a plugin or one of its components
    │   ├── UnknownAliasError            (LookupError) nothing provides this alias
    │   ├── AmbiguousAliasError          (LookupError) several plugins provide it
    │   ├── BrokenPluginError            a manifest that can't be imported or gives nothing (strict mode, direct use)
    │   ├── IncompatiblePluginError      a plugin that requires another torchhal (strict mode)
    │   └── ComponentError               one component can't be used: bad record, missing target, wrong class
    ├── ConfigurationError               (ValueError) an argument, or a combination of arguments, that can't work
    │   ├── UnknownArgumentError         (TypeError) a call has no argument of that name
    │   └── UnsupportedCombinationError  two parts that don't fit each other, both named
    ├── ModelError                       (TypeError) the user's module or data lacks something, or returned nonsense
    ├── AcceleratorUnavailableError      (RuntimeError) the hardware was requested by name and isn't there
    ├── FakeStepError                    (RuntimeError) a training step that can't run without values
    ├── InsufficientMemoryError          (RuntimeError) no strategy makes a training step fit into memory
    ├── LaunchError                      (RuntimeError) the processes could not be started
    ├── DistributedError                 (RuntimeError) processes that should act together don't
    │   ├── RankFailedError              another rank failed first; carries its rank and traceback
    │   └── CollectiveTimeoutError       a barrier or collective timed out; carries the missing ranks
    ├── CheckpointError                  (RuntimeError) a checkpoint can't be written or read
    │   ├── CheckpointCorruptError       damaged: cut off, flipped bits, not a checkpoint
    │   └── CheckpointMismatchError      a sound checkpoint of something else: other keys, other shapes
    └── NonFiniteLossError               (ArithmeticError) NaN or inf where the user requested a stop at one

A wrong argument of one value is a plain ``TypeError`` or ``ValueError`` with the message
``'name' must be ... (got ...)``; what stands above is for what a caller may want to catch by kind. The
pieces of a message are attributes of the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torchhal.lazy_names import lazy_names

__all__ = [
    "AcceleratorUnavailableError",
    "AmbiguousAliasError",
    "BrokenPluginError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CollectiveTimeoutError",
    "ComponentError",
    "ConfigurationError",
    "DistributedError",
    "FakeStepError",
    "IncompatiblePluginError",
    "InsufficientMemoryError",
    "LaunchError",
    "ModelError",
    "NonFiniteLossError",
    "PluginError",
    "RankFailedError",
    "TorchhalError",
    "UnknownAliasError",
    "UnknownArgumentError",
    "UnsupportedCombinationError",
    "message_of",
]


class TorchhalError(Exception):
    """Base of every error that torchhal raises on purpose.

    They travel between processes: pickle keeps their class, message and attributes, for any signature of ``__init__``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[TorchhalError], args: tuple[Any, ...]) -> TorchhalError:
    return kind.__new__(kind, *args)  # BaseException.__new__ keeps the args, of which the message is made


class PluginError(TorchhalError):
    """An error of a plugin or one of its components."""


class UnknownAliasError(PluginError, LookupError):
    """An alias that no component of ``kind`` has; the message lists what exists and what to install."""

    def __init__(self, message: str, *, kind: str, alias: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.alias = alias


class AmbiguousAliasError(PluginError, LookupError):
    """Several plugins provide ``alias``; ``candidates`` are the qualified names that work."""

    def __init__(self, message: str, *, kind: str, alias: str, candidates: Sequence[str]) -> None:
        super().__init__(message)
        self.kind = kind
        self.alias = alias
        self.candidates = tuple(candidates)


class BrokenPluginError(PluginError):
    """A plugin's manifest can't be imported or gives nothing."""


class IncompatiblePluginError(PluginError):
    """A plugin that requires another version of torchhal."""


class ComponentError(PluginError):
    """One component of a plugin can't be used."""


class ConfigurationError(TorchhalError, ValueError):
    """An argument, or a combination of arguments, that can't work."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """A call has no argument of one of ``names``; the message names the replacement."""

    def __init__(self, message: str, *, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


class UnsupportedCombinationError(ConfigurationError):
    """Two parts that don't fit each other; the message names both and what fits."""


class ModelError(TorchhalError, TypeError):
    """The user's module, data module or loader lacks something, or returned something unusable."""


class AcceleratorUnavailableError(TorchhalError, RuntimeError):
    """The accelerator was requested by name and can't be used here, for ``reason``."""

    def __init__(self, message: str, *, alias: str, reason: str) -> None:
        super().__init__(message)
        self.alias = alias
        self.reason = reason


class FakeStepError(TorchhalError, RuntimeError):
    """A training step can't run on fake tensors, which have shapes and no values; the message has the reason.

    Such as ``.item()``, boolean masks, parameters without a shape, or an optimizer that reads its tensors.

    .. versionadded:: 0.2
    """


class InsufficientMemoryError(TorchhalError, RuntimeError):
    """No strategy makes a training step fit into the memory of the devices; the message says how much is missing.

    .. versionadded:: 0.2
    """


class LaunchError(TorchhalError, RuntimeError):
    """The training processes could not be started."""


class DistributedError(TorchhalError, RuntimeError):
    """Processes that should act together don't."""


class RankFailedError(DistributedError):
    """Another rank failed first. ``rank`` is the one to look at, ``traceback`` its text (may be empty).

    ``stop_signal`` is the signal on which it left at once, before training began or on a second Ctrl-C, else 0: then
    nothing has failed.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "", stop_signal: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.stop_signal = stop_signal


class CollectiveTimeoutError(DistributedError):
    """A barrier or collective timed out. ``missing`` are the ranks that did not arrive."""

    def __init__(self, message: str, *, name: str, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.missing = tuple(missing)


class CheckpointError(TorchhalError, RuntimeError):
    """A checkpoint can't be written or read."""


class CheckpointCorruptError(CheckpointError):
    """The checkpoint is damaged: cut off, changed bits, or no checkpoint at all."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is sound but belongs to something else."""


class NonFiniteLossError(TorchhalError, ArithmeticError):
    """A loss or gradient is NaN or infinite and the user requested a stop at one."""


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, also of an exception of the user's whose ``__str__`` raises."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its __str__ raised {type(failure).__name__}>"


if not TYPE_CHECKING:  # any name would do, to a type checker
    __getattr__, __dir__ = lazy_names(__name__, {}, renamed={"AcceleratorUnavailable": "AcceleratorUnavailableError"})
