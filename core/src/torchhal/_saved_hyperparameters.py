"""Save the constructor arguments of modules and data modules, and build them from a checkpoint."""

from __future__ import annotations

import importlib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchhal._arguments import check_bool, check_path
from torchhal._hyperparameters import Hyperparameters, class_paths
from torchhal.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ConfigurationError,
    ModelError,
    TorchhalError,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")

_NEVER_OF_A_FILE = TorchhalError, ImportError, MemoryError, torch.OutOfMemoryError
"""Errors of user code that are raised unchanged, independent of the checkpoint."""


@contextmanager
def raising_mismatch(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Raise what the user's code raises on a checkpoint's content as a CheckpointMismatchError."""
    try:
        yield
    except _NEVER_OF_A_FILE:
        raise
    except Exception as error:  # what it raises depends on what is wrong, and on the user's code
        raise CheckpointMismatchError(describe(error)) from error


if TYPE_CHECKING:
    _class_method_only = classmethod
else:

    class _class_method_only(classmethod):
        """A class method that makes a new object, which a call on an object of the class would drop."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return super().__get__(instance, owner)
            name, method = type(instance).__name__, self.__name__

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise ModelError(
                    f"{method} makes a new object and leaves this one as it is: write model = {name}.{method}(...), "
                    "or model.load_state_dict(...) for weights into this one"
                )

            return refuse


class HasHyperparameters:
    """``save_hyperparameters``, ``hparams`` and ``load_from_checkpoint`` for modules and data modules."""

    _hyperparameter_prefix = ""
    """Of the names under which checkpoints have them: a data module's lie beside the module's."""

    @property
    def hparams(self) -> Hyperparameters:
        """The saved constructor arguments."""
        found = self.__dict__.get("_hparams")
        if found is None:
            found = self.__dict__["_hparams"] = Hyperparameters()
        return found

    def save_hyperparameters(self, *names: Any, ignore: str | Iterable[str] | None = None, logger: bool = True) -> None:
        """Keep the arguments of ``__init__``; they are put into checkpoints and rebuild the object from one.

        Called inside ``__init__``, as its first lines.

        Args:
            names: arguments to keep, all when empty; or one mapping or namespace to keep instead.
            ignore: arguments to leave out, such as modules; None for none.
            logger: whether the loggers get them too.
        """
        if not isinstance(logger, bool):
            raise ConfigurationError(f"'logger' must be a bool (got {logger!r})")
        self.__dict__["_log_hyperparams"] = logger
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if len(names) == 1 and not isinstance(names[0], str):
            whole = names[0]
            values = whole if isinstance(whole, Mapping) else getattr(whole, "__dict__", None)
            if values is None:
                raise ValueError(f"'names' must be names of arguments, or one mapping or namespace (got {whole!r})")
            self.hparams.update({key: value for key, value in values.items() if key not in ignored})
            given = inspect.getargvalues(caller).locals if caller is not None else {}
            self.__dict__["_hparams_name"] = next((name for name, value in given.items() if value is whole), None)
            return
        collected: dict[str, Any] = {}
        while caller is not None and caller.f_code.co_name == "__init__" and _holds(caller, self):
            collected.update(_frame_arguments(caller, self))  # outer frames are the more derived classes
            caller = caller.f_back
        for name in names:
            if not isinstance(name, str) or name not in collected:
                raise ValueError(
                    f"'names' must be arguments of {type(self).__name__}.__init__, which has "
                    f"{', '.join(collected) or 'none'} (got {name!r})"
                )
        keep = set(names) or set(collected)
        self.hparams.update({key: value for key, value in collected.items() if key in keep and key not in ignored})

    @_class_method_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        *,
        map_location: Any = "cpu",
        strict: bool = True,
        weights_only: bool = True,
        checkpoint_io: Any = None,
        **arguments: Any,
    ) -> Self:
        """Return a new object from a checkpoint: constructor arguments from it and ``arguments``; then its state.

        ``checkpoint_io`` is the one that wrote it, where that was not a ``TorchCheckpointIO``. Paths, Enums,
        dataclasses, OmegaConf's containers and the like come back as what they were.

        Raises:
            ConfigurationError: an argument of this method outside its domain.
            FileNotFoundError, CheckpointError: see ``TorchCheckpointIO.load_checkpoint``.
            CheckpointMismatchError: the arguments or the weights don't fit the class, or an argument was an object,
                which no checkpoint holds, and is not among ``arguments``.
        """
        from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
        from torchhal.checkpoint._trainer_format import check_format

        check_path("checkpoint_path", checkpoint_path)
        check_bool("strict", strict)
        check_bool("weights_only", weights_only)
        if checkpoint_io is not None and not isinstance(checkpoint_io, CheckpointIO):
            raise ConfigurationError(
                f"'checkpoint_io' must be a CheckpointIO, the object that wrote the file, or None (got "
                f"{checkpoint_io!r})"
            )
        io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        checkpoint = io.load_checkpoint(checkpoint_path, map_location=map_location, weights_only=weights_only)
        check_format(checkpoint, str(checkpoint_path))
        loaded = build_from_checkpoint(cls, checkpoint, str(checkpoint_path), arguments)
        loaded._restore(checkpoint, str(checkpoint_path), strict=strict)
        return loaded

    def _restore(self, checkpoint: dict[str, Any], path: str, *, strict: bool) -> None:
        raise NotImplementedError


def _holds(frame: Any, owner: Any) -> bool:
    # ``in`` would compare arrays elementwise
    return any(value is owner for value in frame.f_locals.values())


def _frame_arguments(frame: Any, owner: Any) -> dict[str, Any]:
    info = inspect.getargvalues(frame)
    arguments = {name: info.locals[name] for name in info.args if info.locals.get(name) is not owner}
    if info.keywords:
        arguments.update(info.locals[info.keywords])
    return arguments


def build_from_checkpoint(
    make: Callable[..., _T], checkpoint: Mapping[str, Any], path: str, given: Mapping[str, Any]
) -> _T:
    """Call ``make`` with the constructor arguments that the checkpoint holds, and those ``given``.

    Args:
        make: a class, or a function that returns an object.
        checkpoint: as a Trainer saves it.
        path: its path, for messages.
        given: arguments that count more than the saved ones.

    Raises:
        CheckpointMismatchError: ``make`` raised an error, an argument was an object, which no checkpoint holds, or it
            can't be made again.
        CheckpointCorruptError: the field of the arguments has another type.
    """
    called: Any = make
    accepted = inspect.signature(called.__init__ if isinstance(make, type) else make).parameters
    saved = _saved_arguments(make, accepted, checkpoint, path, given)
    whole: Any = checkpoint.get(f"{_prefix(make)}hparams_name")
    if isinstance(whole, str) and whole in accepted:  # they were given in one argument, so they go back into it
        saved = {whole: Hyperparameters(saved)}
    elif not _takes_any(accepted):
        saved = {name: value for name, value in saved.items() if name in accepted}
    if any(any(class_paths(value)) for value in saved.values()):
        # a command line may have saved how to make objects; it lies above what loads, so it is imported by its name
        command_line = importlib.import_module("torchhal.trainer_cli._saved_arguments")
        saved = command_line.instantiate_saved(make, saved, path)
    names = ", ".join(name for name in saved if name not in given) or "none"
    with raising_mismatch(
        lambda error: (
            f"{_name(make)} can't be built from {path!r}: {'its __init__' if isinstance(make, type) else 'it'} raised "
            f"{type(error).__name__}: {error}. Arguments from the file: {names}. Pass what it lacks, or has "
            "otherwise, as arguments here, or call save_hyperparameters() in __init__ and save anew"
        )
    ):
        return make(**{**saved, **given})


def _saved_arguments(
    make: Callable[..., Any],
    accepted: Mapping[str, inspect.Parameter],
    checkpoint: Mapping[str, Any],
    path: str,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the saved arguments that are not ``given``."""
    from torchhal._hyperparameters import from_plain

    prefix, any_name = _prefix(make), _takes_any(accepted)
    for field in ("hparams_left_out", "hyper_parameters"):
        found = checkpoint.get(f"{prefix}{field}")
        if found is not None and not (isinstance(found, Mapping) and all(isinstance(name, str) for name in found)):
            raise CheckpointCorruptError(
                f"{path!r} is damaged: its field '{prefix}{field}' must be a dict from names to values (got "
                f"{reprlib.repr(found)})"
            )
    objects = checkpoint.get(f"{prefix}hparams_left_out") or {}
    if asked := [name for name in objects if name not in given and (any_name or name in accepted)]:
        listing = ", ".join(f"{name}=... (a {objects[name]})" for name in asked)
        raise CheckpointMismatchError(
            f"{_name(make)} can't be built from {path!r} alone: it was made with objects, which no "
            f"checkpoint holds. Pass {listing}"
        )
    saved = {}
    for name, value in (checkpoint.get(f"{prefix}hyper_parameters") or {}).items():
        if name in given:
            continue
        try:
            saved[name] = from_plain(value)
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointMismatchError(
                f"{_name(make)} can't be built from {path!r}: its hyperparameter {name!r}: {error}. Pass {name}=..."
            ) from error
    return saved


def _prefix(make: Callable[..., Any]) -> str:
    prefix: str = getattr(make, "_hyperparameter_prefix", "")
    return prefix


def _name(make: Callable[..., Any]) -> str:
    name: str = getattr(make, "__name__", repr(make))
    return name


def _takes_any(accepted: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
