"""Save the parsed arguments of a model or a data module as hyperparameters, and make the objects among them again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import Any

from torchhal._hyperparameters import NotPlainError, class_paths, is_class_path, to_plain
from torchhal.errors import CheckpointMismatchError
from torchhal.trainer_cli._parser import TrainerParser, check_jsonargparse


def save_arguments(owner: Any, called_with: Mapping[str, Any], parsed: Mapping[str, Any]) -> None:
    """Make the constructor arguments of ``owner`` its hyperparameters, unless it called ``save_hyperparameters``.

    An argument that is an object is saved as the ``class_path`` dict of the configuration; one that no configuration
    describes, such as a linked attribute, is left out.

    Args:
        owner: a Module or a DataModule.
        called_with: the arguments that it was made with.
        parsed: those of the configuration, as :func:`plain_arguments` returns them.
    """
    if "_log_hyperparams" in vars(owner) or owner.hparams:  # which every call of save_hyperparameters sets
        return
    for name, value in called_with.items():
        try:
            to_plain(value)
        except NotPlainError:
            if parsed.get(name) is not None:
                owner.hparams[name] = parsed[name]
        else:
            owner.hparams[name] = value


def plain_arguments(parser: TrainerParser, config: Any, key: str) -> dict[str, Any]:
    """Return the arguments of the model or the data module in a configuration, as plain data."""
    text = parser.dump(config, format="json", skip_unset=False, skip_link_targets=False)
    arguments: Mapping[str, Any] = json.loads(text[text.index("{") :]).get(key) or {}  # comments come first
    if is_class_path(arguments):
        return {**(arguments.get("init_args") or {}), **(arguments.get("dict_kwargs") or {})}
    return dict(arguments)


def instantiate_saved(make: Callable[..., Any], saved: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the saved arguments of ``make`` with objects in the place of their ``class_path`` dicts.

    Its type annotations decide, as on the command line: of an argument that takes any dict, the dict stays. A file
    chooses among classes that are imported already, and of the annotated type.

    Raises:
        CheckpointMismatchError: an object can't be made again.
    """
    described = {name: value for name, value in saved.items() if any(class_paths(value))}
    made = {}
    for name, value in described.items():
        try:
            made[name] = _instantiate_argument(make, name, value)
        except (argparse.ArgumentError, ImportError, ValueError) as error:
            raise CheckpointMismatchError(
                f"{getattr(make, '__name__', make)} can't be built from {path!r} alone: its hyperparameter {name!r}: "
                f"{error}. Pass {name}=..."
            ) from error
    return {**saved, **made}


def _instantiate_argument(make: Callable[..., Any], name: str, value: Any) -> Any:
    check_jsonargparse()
    names = {option.removeprefix("saved.") for option in _parser_of(make).option_names()}
    if name not in names:
        return value
    parser = _parser_of(make, skip=names - {name})
    with suppress(argparse.ArgumentError):
        parser.parse_object({"saved": {name: {"": ""}}})
        return value  # takes any dict
    for class_path in class_paths(value):
        _check_imported(class_path)
    return parser.instantiate(parser.parse_object({"saved": {name: value}})).saved[name]


def _parser_of(make: Callable[..., Any], skip: Set[str] = frozenset()) -> TrainerParser:
    parser = TrainerParser(exit_on_error=False)
    cls = make if isinstance(make, type) else _class_of(make)
    parser.add_class_arguments(cls, "saved", skip=set(skip), fail_untyped=False, instantiate=False)
    return parser


def _class_of(function: Callable[..., Any]) -> type[Any]:
    from jsonargparse import class_from_function

    made: type[Any] = class_from_function(function)
    return made


def _check_imported(class_path: str) -> None:
    """Raise ValueError unless the class is there already: no file has a module imported."""
    module, _, _ = class_path.rpartition(".")
    while module and module not in sys.modules:  # a class inside of a class
        module, _, _ = module.rpartition(".")
    found: Any = sys.modules.get(module)
    for part in class_path.removeprefix(f"{module}.").split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ValueError(f"{class_path!r} is not imported: import it before the load")
