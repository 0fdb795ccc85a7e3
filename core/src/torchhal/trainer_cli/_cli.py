"""Make a Trainer, a model and a data module of a command line and of configuration files, and run them."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

import torchhal
from torchhal.checkpoint._location import is_url
from torchhal.errors import ConfigurationError, PluginError
from torchhal.module import DataModule, Module
from torchhal.rng import seed_everything
from torchhal.suggestions import did_you_mean
from torchhal.trainer import Trainer
from torchhal.trainer_cli._config_file import SaveConfig
from torchhal.trainer_cli._messages import explain_import
from torchhal.trainer_cli._optimizers import ConfigureOptimizers, LRSchedulerCallable, OptimizerCallable
from torchhal.trainer_cli._parser import TrainerParser, check_jsonargparse
from torchhal.trainer_cli._saved_arguments import plain_arguments, save_arguments

_EVALUATION = frozenset({"model", "dataloaders", "datamodule"})
SUBCOMMANDS: Mapping[str, frozenset[str]] = {
    "fit": frozenset({"model", "train_dataloaders", "val_dataloaders", "datamodule"}),
    "validate": _EVALUATION,
    "test": _EVALUATION,
    "predict": _EVALUATION,
}
"""The methods of the Trainer that a command line may name, and those of their arguments that it doesn't set."""

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NAMED_PARTS = ("accelerator", "strategy", "precision", "plugins", "logger", "callbacks")


class TrainerCLI:
    """Command line for the Trainer, a model and a data module.

    ``python train.py fit --config c.yaml --model.lr 0.1``: the options are the arguments of their classes, with their
    types and docstrings; :meth:`run` parses them, makes the objects and calls the Trainer. A script calls it below
    ``if __name__ == "__main__"``: processes that import the script must not. ``--print_config`` prints a configuration
    file, and each fit saves its own in the run's folder.

    Args:
        model_class: the class of the model, or a function that returns one; None: a subclass of ``Module``, which
            ``--model`` names.
        datamodule_class: the same for the data module; None: there is none unless ``--data`` names one.
        trainer_class: the class of the Trainer.
        trainer_defaults: arguments of the Trainer that replace the defaults, as a file would give them: aliases, and
            ``{"class_path": ..., "init_args": {...}}`` in the place of objects. Its ``callbacks``, objects too, are
            added to those of the command line.
        seed_everything_default: what ``--seed_everything`` is by default: a seed; True: that of ``TORCHHAL_SEED``, or
            0; False: none is set.
        subclass_mode_model: let ``--model`` name a subclass of ``model_class``.
        subclass_mode_data: the same for the data module.
        env_prefix: read environment variables that begin so, as ``PREFIX_FIT__TRAINER__MAX_EPOCHS``; None reads none.
        default_config_files: files that are read before those of the command line, where they exist.

    Attributes:
        parser: of the command line, with a parser of its own for each subcommand.
        config: what was parsed, for the subcommand.
        subcommand: "fit", "validate", "test" or "predict"; None after :meth:`instantiate`.
        model: the model.
        datamodule: the data module, or None.
        trainer: the Trainer.

    Raises:
        ConfigurationError: ``trainer_defaults`` has what the Trainer doesn't take, or an object.
        ImportError: jsonargparse is not installed, or too old.

    .. versionadded:: 0.2
    """

    parser: Any
    config: Any
    subcommand: str | None
    model: Any
    datamodule: Any
    trainer: Any

    def __init__(
        self,
        model_class: type[nn.Module] | Callable[..., nn.Module] | None = None,
        datamodule_class: type[Any] | Callable[..., Any] | None = None,
        *,
        trainer_class: type[Trainer] = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        env_prefix: str | None = None,
        default_config_files: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        check_jsonargparse()
        self._model_class = model_class or Module
        self._datamodule_class = datamodule_class or DataModule
        self._data_required = datamodule_class is not None
        self._subclass_mode_model = subclass_mode_model or model_class is None
        self._subclass_mode_data = subclass_mode_data or datamodule_class is None
        self._trainer_class = trainer_class
        self._trainer_defaults = dict(trainer_defaults or {})
        self._default_callbacks = self._trainer_defaults.pop("callbacks", None)
        self._seed_default = seed_everything_default
        self._env = {} if env_prefix is None else {"default_env": True, "env_prefix": env_prefix}
        self._default_config_files = [os.fspath(path) for path in default_config_files]
        self.subcommand = None
        self._method_arguments: dict[str, list[str]] = {}
        self._subparsers: dict[str, TrainerParser] = {}
        self.parser = self._make_parser()
        added = self.parser.add_subcommands()
        for name, skip in SUBCOMMANDS.items():
            said = (getattr(trainer_class, name).__doc__ or "").strip().partition("\n")[0]
            parser = self._make_parser(description=said, default_config_files=self._default_config_files)
            self._add_arguments(parser)
            self._method_arguments[name] = parser.add_method_arguments(
                trainer_class, name, skip=set(skip), fail_untyped=False
            )
            self._subparsers[name] = parser
            added.add_subcommand(name, parser, help=said)

    # -- parsers ---------------------------------------------------------------------------------------------

    def _make_parser(self, **kwargs: Any) -> TrainerParser:
        from jsonargparse import ActionConfigFile

        header = [f"torchhal=={torchhal.__version__}"]
        parser = TrainerParser(dump_header=header, exit_on_error=False, **self._env, **kwargs)
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="a configuration file; of several, the later ones count"
        )
        return parser

    def _add_arguments(self, parser: TrainerParser) -> None:
        parser.add_argument(
            "--seed_everything", type=bool | int, default=self._seed_default,
            help="the seed of all random numbers; true: that of TORCHHAL_SEED, or 0; false: none is set",
        )  # fmt: skip
        parser.add_class_arguments(self._trainer_class, "trainer", instantiate=False, sub_configs=True)
        for name, value in self._trainer_defaults.items():
            _set_default(parser, name, value)
        _add_class(parser, self._model_class, "model", choose=self._subclass_mode_model, required=True)
        _add_class(
            parser, self._datamodule_class, "data", choose=self._subclass_mode_data, required=self._data_required
        )
        parser.add_argument(
            "--optimizer", type=OptimizerCallable | None, help="a class that replaces the model's configure_optimizers"
        )
        parser.add_argument("--lr_scheduler", type=LRSchedulerCallable | None, help="the scheduler of --optimizer")
        self.add_arguments_to_parser(parser)

    def add_arguments_to_parser(self, parser: TrainerParser) -> None:
        """Add options, defaults and links between arguments; for subclasses, called for each subcommand.

        Args:
            parser: has ``link_arguments``, ``set_defaults`` and ``add_argument`` of jsonargparse's.
        """

    # -- a run -----------------------------------------------------------------------------------------------

    def run(self, args: Sequence[str] | None = None) -> Any:
        """Parse, make the objects, and call the Trainer's method that the subcommand names.

        Args:
            args: the words of the command line; None: those of this process, whose errors end it with a line on stderr
                and exit code 2.

        Returns:
            What the Trainer's method returned.

        Raises:
            ConfigurationError: ``args`` have an unknown or a wrong option.
        """
        with self._reporting(args is None):
            config = self.parser.parse_args(None if args is None else list(args))
            self.subcommand = config.subcommand
            self._take(config[config.subcommand], self._subparsers[config.subcommand])
            _check_checkpoint(self.config.get("ckpt_path"))
        call = getattr(self.trainer, config.subcommand)
        arguments = {name: self.config[name] for name in self._method_arguments[config.subcommand]}
        data = {} if self.datamodule is None else {"datamodule": self.datamodule}
        return call(self.model, **data, **arguments)

    def instantiate(self, args: Sequence[str] | None = None) -> tuple[Any, Any, Any]:
        """Parse options without a subcommand and make the objects, for a script that goes on by itself.

        Args:
            args: as in :meth:`run`.

        Returns:
            The Trainer, the model and the data module, or None in its place.

        Raises:
            ConfigurationError: ``args`` have an unknown or a wrong option.
        """
        parser = self._make_parser(default_config_files=self._default_config_files)
        self._add_arguments(parser)
        with self._reporting(args is None):
            self.subcommand = None
            self._take(parser.parse_args(None if args is None else list(args)), parser)
        return self.trainer, self.model, self.datamodule

    def _take(self, config: Any, parser: TrainerParser) -> None:
        """Make the objects of a configuration."""
        from jsonargparse import Namespace

        if parser.default_env:
            parser.check_environment()
        for key in ("trainer", "model", "data"):
            if config.get(key) is not None and not isinstance(config[key], Namespace):
                raise ConfigurationError(f"{key}: must be a dict of options (got {config[key]!r})")
        self._check_names(config)
        for key, cls, is_chosen in (
            ("model", self._model_class, self._subclass_mode_model),
            ("data", self._datamodule_class, self._subclass_mode_data),
        ):
            if not is_chosen:
                _check_untyped(cls, key, config[key])
        if config.seed_everything is not False:
            given = config.seed_everything
            config.seed_everything = seed_everything(None if given is True else given)
        self.config = config
        made = _instantiate(parser, config)
        self.model, self.datamodule = made.model, made.get("data")
        if made.optimizer is not None:
            self.model.configure_optimizers = ConfigureOptimizers(self.model, made.optimizer, made.lr_scheduler)
        elif made.lr_scheduler is not None:
            raise ConfigurationError("'lr_scheduler' is the scheduler of 'optimizer', which is missing: give both")
        options = vars(made.trainer)
        callbacks = [*_several(options["callbacks"]), *_several(self._default_callbacks)]
        callbacks.append(SaveConfig(parser.dump(config, skip_unset=False)))
        self.trainer = self._trainer_class(**{**options, "callbacks": callbacks})

    def _check_names(self, config: Any) -> None:
        """Refuse a string that was meant as a class or a list, which jsonargparse takes for an alias.

        Raises:
            ConfigurationError: see above.
        """
        for argument in _NAMED_PARTS:
            for value in _several(config.trainer.get(argument)):
                if not isinstance(value, str):
                    continue
                if value.lstrip().startswith(("[", "{")):
                    self._parse_again(argument, value)
                elif "." in value and (reason := explain_import(value)):
                    raise ConfigurationError(f"trainer.{argument}: {reason}")

    def _parse_again(self, argument: str, text: str) -> None:
        """Raise the error of a list or a dict, which is none of a string's."""
        parser = self._make_parser()
        parser.add_class_arguments(self._trainer_class, "trainer", instantiate=False)
        try:
            parser.parse_string(f"trainer: {{{argument}: {text}}}")
        except argparse.ArgumentError as error:
            where = "" if str(error).startswith("trainer.") else f"trainer.{argument}: "
            raise ConfigurationError(f"{where}{error}") from error

    @contextmanager
    def _reporting(self, of_process: bool) -> Iterator[None]:
        """Raise what is wrong with the options as a ConfigurationError, or end the process with it."""
        try:
            yield
        except argparse.ArgumentError as error:
            message, cause = str(error), error.__cause__
        except (ConfigurationError, PluginError) as error:
            if not of_process:
                raise
            message, cause = str(error), error
        else:
            return
        if of_process:
            prog = os.path.basename(sys.argv[0])
            self.parser.exit(2, f"{prog}: error: {message}\n")
        raise ConfigurationError(message) from cause


def _check_checkpoint(path: Any) -> None:
    """Refuse a path at which nothing is, before the run is set up."""
    if isinstance(path, str) and path not in ("last", "best") and not is_url(path) and not os.path.exists(path):
        raise ConfigurationError(f"ckpt_path: nothing is at {path!r}")


def _set_default(parser: TrainerParser, name: str, value: Any) -> None:
    known = {each.removeprefix("trainer.") for each in parser.option_names() if each.startswith("trainer.")}
    if name not in known:
        raise ConfigurationError(
            f"'trainer_defaults' has {name!r}, which the Trainer doesn't take{did_you_mean(name, known)}"
        )
    try:
        parser.set_defaults({f"trainer.{name}": value})
    except ValueError:
        raise ConfigurationError(
            f"'trainer_defaults' must hold for {name!r} what a file can: an alias, with options or without, or "
            f"{{'class_path': ..., 'init_args': {{...}}}} (got {value!r})"
        ) from None


def _check_untyped(cls: Any, key: str, given: Any) -> None:
    """Refuse a missing value of an argument without a type, for which jsonargparse passes None.

    Raises:
        ConfigurationError: see above; or the class has an argument that no option can give.
    """
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigurationError(
                f"{key}: {cls.__name__} takes {parameter.name!r} by position only, which no option can give: leave out "
                "the '/' behind it"
            )
        is_required = parameter.default is parameter.empty and parameter.kind not in _SEVERAL
        if is_required and parameter.annotation is parameter.empty and given.get(parameter.name) is None:
            raise ConfigurationError(f"{key}.{parameter.name} must be given")


def _add_class(parser: TrainerParser, cls: Any, key: str, *, choose: bool, required: bool) -> None:
    from jsonargparse import class_from_function

    if not isinstance(cls, type):
        cls = class_from_function(cls)
    if choose:
        parser.add_subclass_arguments(cls, key, fail_untyped=False, required=required)
    else:
        parser.add_class_arguments(cls, key, fail_untyped=False, sub_configs=True)


class _ConstructionError(BaseException):
    """What a class raised; no Exception, of which jsonargparse keeps only the text to try another type."""

    def __init__(self, error: Exception) -> None:
        self.error = error


_CALLS: ContextVar[dict[int, Mapping[str, Any]] | None] = ContextVar("_CALLS", default=None)
"""The arguments of each object by its id while jsonargparse calls :func:`_make`; else None, as what it has made for
later, such as optimizers, calls that too."""


def _instantiate(parser: TrainerParser, config: Any) -> Any:
    """Return the objects of a configuration; raise what one of their classes raises.

    The arguments of the model and of the data module become their hyperparameters.
    """
    calls: dict[int, Mapping[str, Any]] = {}
    token = _CALLS.set(calls)
    try:
        made = parser.instantiate(config, instantiators=[(_make, object, True)])
    except _ConstructionError as failed:
        error = failed.error
    else:
        for key in ("model", "data"):
            owner = made.get(key)
            if isinstance(owner, Module | DataModule) and id(owner) in calls:
                save_arguments(owner, calls[id(owner)], plain_arguments(parser, config, key))
        return made
    finally:
        _CALLS.reset(token)
    raise error


def _make(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    """Return an object, and record its arguments."""
    calls = _CALLS.get()
    try:
        made = cls(*args, **kwargs)
    except Exception as error:
        if calls is not None:
            raise _ConstructionError(error) from None
        raise
    if calls is not None:
        calls[id(made)] = kwargs
    return made


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
