"""Make a Trainer, a model and a data module of a command line and of configuration files, by jsonargparse."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MethodType
from typing import Any

from jsonargparse import ActionConfigFile, Namespace, class_from_function
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchhal.trainer.adapters import implements
from torchhal.trainer_cli import (
    SUBCOMMANDS,
    ReduceLROnPlateau,
    TrainerParser,
    with_schedule,
)
from torchhal_lightning.stand_in.pytorch.callbacks import Callback
from torchhal_lightning.stand_in.pytorch.core import LightningDataModule, LightningModule
from torchhal_lightning.stand_in.pytorch.trainer import Trainer
from torchhal_lightning.stand_in.pytorch.utilities import get_filesystem, seed_everything

ArgsType = list[str] | dict[str, Any] | Namespace | None

_AUTOMATIC = "AUTOMATIC"
"""Of an optimizer that the model's ``configure_optimizers`` returns, rather than an argument of the model."""


class LightningArgumentParser(TrainerParser):
    """A parser whose options are the arguments of classes."""

    def __init__(self, *args: Any, description: str = "", env_prefix: str = "PL", **kwargs: Any) -> None:
        super().__init__(*args, description=description, env_prefix=env_prefix, **kwargs)
        self.callback_keys: list[str] = []
        self.optimizers: dict[str, tuple[Any, str]] = {}
        self.lr_schedulers: dict[str, tuple[Any, str]] = {}

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a Trainer, a module, a data module or a callback.

        Args:
            lightning_class: the class, or a function that returns an object of one.
            nested_key: what the options begin with.
            subclass_mode: let the class be chosen, among its subclasses.
            required: whether it has to be.
        """
        if not isinstance(lightning_class, type):
            lightning_class = class_from_function(lightning_class)
        if issubclass(lightning_class, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            added = self.add_subclass_arguments(lightning_class, nested_key, fail_untyped=False, required=required)
            return [] if added is None else list(added)
        makes = not issubclass(lightning_class, Trainer)  # the Trainer is made later, with more callbacks
        found: list[str] = self.add_class_arguments(
            lightning_class, nested_key, fail_untyped=False, instantiate=makes, sub_configs=True
        )
        return found

    def add_optimizer_args(
        self, optimizer_class: Any = (Optimizer,), nested_key: str = "optimizer", link_to: str = _AUTOMATIC
    ) -> None:
        """Add an optimizer: of one class, or among the subclasses of several.

        Args:
            optimizer_class: the class, or a tuple of base classes.
            nested_key: what the options begin with.
            link_to: the argument that gets it as a dict; else ``configure_optimizers`` returns it.
        """
        self.optimizers[nested_key] = (optimizer_class, link_to)
        self._add_made_later(optimizer_class, nested_key, {"params"})

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Any = (LRScheduler, ReduceLROnPlateau),
        nested_key: str = "lr_scheduler",
        link_to: str = _AUTOMATIC,
    ) -> None:
        """Add a scheduler; see :meth:`add_optimizer_args`."""
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)
        self._add_made_later(lr_scheduler_class, nested_key, {"optimizer"})

    def _add_made_later(self, cls: Any, nested_key: str, skip: set[str]) -> None:
        options = {"instantiate": False, "fail_untyped": False, "skip": skip}
        if isinstance(cls, tuple):
            self.add_subclass_arguments(cls, nested_key, **options)
        else:
            self.add_class_arguments(cls, nested_key, sub_configs=True, **options)


class SaveConfigCallback(Callback):
    """Saves the configuration of a run beside its logs.

    Args:
        parser: that has parsed it.
        config: of the run.
        config_filename: of the file.
        overwrite: whether one that is there is overwritten.
        multifile: whether parts that came from files of their own are written to such.
        save_to_log_dir: False: only :meth:`save_config` is called.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser, self.config, self.config_filename = parser, config, config_filename
        self.overwrite, self.multifile, self.save_to_log_dir = overwrite, multifile, save_to_log_dir
        self.already_saved = False
        self._text: str | None = None
        """The configuration, in a process that a launcher has started by pickle."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Save, before the first run.

        Raises:
            RuntimeError: there is a file already, of another run.
        """
        if self.already_saved:
            return
        if self.save_to_log_dir:
            folder = str(trainer.log_dir)
            path, files = os.path.join(folder, self.config_filename), get_filesystem(folder)
            if trainer.strategy.broadcast(not self.overwrite and files.exists(path)):
                raise RuntimeError(
                    f"{path!r} is there already, and {type(self).__name__}(overwrite=False): give the run a folder of "
                    "its own, or save_config_kwargs={'overwrite': True}"
                )
            if trainer.is_global_zero:
                files.makedirs(folder, exist_ok=True)
                self._write(path, files)
        if trainer.is_global_zero:
            self.save_config(trainer, module, stage)
        self.already_saved = True

    def _write(self, path: str, files: Any) -> None:
        if self._text is None:
            self.parser.save(self.config, path, skip_none=False, overwrite=self.overwrite, multifile=self.multifile)
            return
        with files.open(path, "w") as file:
            file.write(self._text)

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Save it elsewhere too; for subclasses, on rank 0."""

    def __getstate__(self) -> dict[str, Any]:
        text = self.parser.dump(self.config, skip_none=False) if self._text is None else self._text
        return {**self.__dict__, "parser": None, "config": None, "_text": text}


class LightningCLI:
    """Makes the objects that a command line names, and runs one of the Trainer's methods.

    Args:
        model_class: the model's class; None: the command line chooses one.
        datamodule_class: the same for the data module, of which there may be none.
        save_config_callback: saves the configuration of each run; None: nothing does.
        save_config_kwargs: its arguments.
        trainer_class: of the Trainer.
        trainer_defaults: arguments of the Trainer that a command line may override; ``callbacks`` are added.
        seed_everything_default: the seed; True: 0 or ``PL_GLOBAL_SEED``; False: none is set.
        parser_kwargs: of the parser, or by subcommand.
        parser_class: of the parser.
        subclass_mode_model: let the command line choose a subclass of ``model_class``.
        subclass_mode_data: the same for the data module.
        args: in the place of ``sys.argv``.
        run: whether the command line names a method, which runs; False: objects are made only.
        auto_configure_optimizers: whether ``--optimizer`` and ``--lr_scheduler`` are options.
        load_from_checkpoint_support: taken and not used: checkpoints have the arguments of ``save_hyperparameters``.

    Attributes:
        config: what was parsed.
        config_init: the same, with objects in the place of those that are made.
        model: the model.
        datamodule: the data module, or None.
        trainer: the Trainer.
        subcommand: the Trainer's method, or None.
    """

    config: Any
    config_init: Any

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: Any = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        by_subcommand = run and bool(self.subcommands().keys() & (parser_kwargs or {}).keys())
        self.parser = self.init_parser(**({} if by_subcommand else parser_kwargs or {}))
        self._subparsers: dict[str, LightningArgumentParser] = {}
        self._method_arguments: dict[str, list[str]] = {}
        if run:
            self._add_subcommands(parser_kwargs or {} if by_subcommand else {})
        else:
            self._add_arguments(self.parser)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        seed = self._get(self.config, "seed_everything")
        if seed is not None and seed is not False:
            seed_everything(None if seed is True else int(seed), workers=True)
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- parsers ---------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser with ``--config``."""
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="a configuration file")
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the Trainer's methods that a command line may name, and their arguments that it doesn't set."""
        return {name: set(skip) for name, skip in SUBCOMMANDS.items()}

    def _add_subcommands(self, parser_kwargs: dict[str, Any]) -> None:
        added = self.parser.add_subcommands()
        for name, skip in self.subcommands().items():
            method = getattr(self.trainer_class, name)
            said = (method.__doc__ or "").strip().partition("\n")[0]
            kwargs = parser_kwargs.get(name, {})
            parser = self.init_parser(**{"description": said, **kwargs})
            self._add_arguments(parser)
            self._method_arguments[name] = parser.add_method_arguments(
                self.trainer_class, name, skip=set(skip), fail_untyped=False
            )
            self._subparsers[name] = parser
            added.add_subcommand(name, parser, help=said)

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything", type=bool | int, default=self.seed_everything_default,
            help="the seed of all random numbers; true: 0, or of PL_GLOBAL_SEED; false: none",
        )  # fmt: skip
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        model, data = self.model_class or LightningModule, self.datamodule_class or LightningDataModule
        parser.add_lightning_class_args(model, "model", subclass_mode=self.subclass_mode_model)
        required = self.datamodule_class is not None
        parser.add_lightning_class_args(data, "data", subclass_mode=self.subclass_mode_data, required=required)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args()
        for key, (cls, link_to) in (parser.optimizers | parser.lr_schedulers).items():
            if link_to != _AUTOMATIC:
                parser.link_arguments(key, link_to, compute_fn=_with_class_path(cls))

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options, defaults and links; for subclasses."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the command line into ``self.config``."""
        if args is not None and len(sys.argv) > 1:
            warnings.warn(f"LightningCLI(args=...) is used, not the command line {sys.argv[1:]}", stacklevel=3)
        self.config = parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(args)

    # -- objects ---------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Change ``self.config``; for subclasses."""

    def after_instantiate_classes(self) -> None:
        """Change the model, the data module or the Trainer; for subclasses."""

    def instantiate_classes(self) -> None:
        """Make the data module, the model and the Trainer."""
        self.config_init = self.parser.instantiate(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._give_optimizers()
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return the Trainer, with the callbacks of all sources.

        Args:
            kwargs: arguments that it has instead of the command line's.
        """
        options = {**(self._get(self.config_init, "trainer") or {}), **kwargs}
        callbacks = _as_list(options.get("callbacks"))
        callbacks += [self._get(self.config_init, key) for key in self._parser.callback_keys]
        callbacks += _as_list(self.trainer_defaults.get("callbacks"))
        if self.save_config_callback is not None and not options.get("fast_dev_run"):
            config = self.config if self.subcommand is None else self.config[self.subcommand]
            callbacks.append(self.save_config_callback(self._parser, config, **self.save_config_kwargs))
        return self.trainer_class(**{**options, "callbacks": callbacks})

    @property
    def _parser(self) -> LightningArgumentParser:
        return self.parser if self.subcommand is None else self._subparsers[self.subcommand]

    def _get(self, config: Any, key: str) -> Any:
        own = config if self.subcommand is None else config.get(self.subcommand)
        return None if own is None else own.get(key)

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return what the model's ``configure_optimizers`` does; for subclasses.

        Args:
            lightning_module: the model.
            optimizer: of the command line.
            lr_scheduler: the same, or None.
        """
        return with_schedule(optimizer, lr_scheduler)

    def _give_optimizers(self) -> None:
        """Let the model's ``configure_optimizers`` return what the command line names."""
        found = []
        for options in (self._parser.optimizers, self._parser.lr_schedulers):
            automatic = [(key, cls) for key, (cls, link_to) in options.items() if link_to == _AUTOMATIC]
            if len(automatic) > 1:
                raise ValueError(f"one of {', '.join(key for key, _ in automatic)} can be automatic: link the others")
            given = [(cls, self._get(self.config_init, key)) for key, cls in automatic]
            found.append(given[0] if given and given[0][1] is not None else None)
        optimizer, scheduler = found
        if optimizer is None:
            return
        if implements(self.model, "configure_optimizers"):
            warnings.warn(
                f"{type(self.model).__name__}.configure_optimizers gives way to the optimizer of the command line",
                stacklevel=2,
            )

        def configure_optimizers(module: Any) -> Any:
            made = instantiate_class(module.parameters(), _with_class_path(optimizer[0])(optimizer[1]))
            schedules = None
            if scheduler is not None:
                schedules = instantiate_class(made, _with_class_path(scheduler[0])(scheduler[1]))
            return self.configure_optimizers(module, made, schedules)

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    # -- the run ---------------------------------------------------------------------------------------------

    def _run_subcommand(self, name: str) -> None:
        getattr(self, f"before_{name}", _nothing)()
        arguments = {each: self._get(self.config_init, each) for each in self._method_arguments[name]}
        data = {} if self.datamodule is None else {"datamodule": self.datamodule}
        getattr(self.trainer, name)(self.model, **data, **arguments)
        getattr(self, f"after_{name}", _nothing)()


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Return an object of ``init["class_path"]``, made with ``args`` and ``init["init_args"]``.

    Args:
        args: the first argument, or a tuple of several.
        init: the class and its keywords.
    """
    module, _, name = init["class_path"].rpartition(".")
    cls = getattr(import_module(module), name)
    return cls(*(args if isinstance(args, tuple) else (args,)), **(init.get("init_args") or {}))


def _with_class_path(cls: Any) -> Callable[[Any], dict[str, Any]]:
    """Return a function of what was parsed for an optimizer or a scheduler that returns its class and arguments."""

    def described(config: Any) -> dict[str, Any]:
        values = config.as_dict() if isinstance(config, Namespace) else dict(config)
        if isinstance(cls, tuple):  # chosen on the command line
            return values
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": values}

    return described


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _nothing() -> None: ...
