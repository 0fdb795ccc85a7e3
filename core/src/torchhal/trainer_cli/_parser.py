"""Parse command lines and configuration files strictly, and explain what is wrong in one line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import optim

from torchhal.module import DataModule, Module
from torchhal.strategies import Strategy
from torchhal.suggestions import did_you_mean, nearest
from torchhal.trainer.callbacks import Callback
from torchhal.trainer.loggers import Logger
from torchhal.trainer_cli._messages import shorten

try:
    from jsonargparse import ArgumentParser
except ImportError:  # TrainerCLI says what to install
    ArgumentParser = object

_UNKNOWN = [
    r"(?:Subcommand '(?P<subcommand>\w+)'|Group '(?P<group>[^']+)') does not accept option '(?P<name>[^']+)'",
    r"Option '(?P<name>[^']+)' is not accepted",
    r"unrecognized arguments: (?P<name>[^\s=]+)",
]
_BASES = (Callback, DataModule, Logger, Module, Strategy, optim.Optimizer, optim.lr_scheduler.LRScheduler)


def check_jsonargparse() -> None:
    """Raise ImportError, with what to install, where jsonargparse can't be imported or is too old."""
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        problem = str(error)
    else:
        if hasattr(ArgumentParser, "instantiate"):
            return
        problem = "the one that is installed is too old"
    raise ImportError(f"a command line needs jsonargparse 4.53 or later ({problem}): pip install 'torchhal[cli]'")


class TrainerParser(ArgumentParser):  # type: ignore[misc]
    """jsonargparse's parser, which takes no prefix of an option's name for the option, and has short messages.

    Args:
        *args: of jsonargparse's ``ArgumentParser``.
        **kwargs: the same.

    .. versionadded:: 0.2
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._reading = ""
        """The file that is read, for messages."""

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Parse a configuration file.

        Args:
            path: of the file.
            *args: of jsonargparse's ``parse_path``.
            **kwargs: the same.

        Raises:
            ArgumentError: see :meth:`error`.
        """
        outer, self._reading = self._reading, os.fspath(path)
        try:
            parsed = super().parse_path(path, *args, **kwargs)
            known = self.option_names()
            for key in parsed.keys():  # noqa: SIM118 - with those below them
                if not key.rpartition(".")[2].startswith("__") and not _is_option(key, known):
                    self.error(self._no_option(key))
            return parsed
        finally:
            self._reading = outer

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with a line about what is wrong, or raise an ArgumentError where ``exit_on_error`` is False.

        Args:
            message: of jsonargparse's.
            ex: what was raised.

        Raises:
            ArgumentError: see above.
        """
        sentence = self._explain(message)
        if self._reading:
            sentence = f"{self._reading}: {sentence}"
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, sentence) from ex
        prog = self.prog.replace(" [options]", "")
        self.exit(2, f"{prog}: error: {sentence}\n")
        raise AssertionError  # for type checkers: exit raises SystemExit

    def _explain(self, message: str) -> str:
        for pattern in _UNKNOWN:
            if match := re.match(pattern, message):
                found = match.groupdict()
                parser = self._subcommands().get(found.get("subcommand") or "", self)
                return parser._no_option(".".join(filter(None, (found.get("group"), found["name"]))))
        if message.startswith('expected "subcommand"'):
            return f"give a subcommand, one of {', '.join(self._subcommands())}"
        sentence = shorten(message)
        if sentence.startswith("Unexpected config"):
            return "the file must have options by their names, as --print_config prints them"
        if missing := re.match(r"(.+) must be given$", sentence):
            names = missing[1].split(", ")
            return f"{', '.join(self._below_subcommand(name) for name in names)} must be given"
        if wrong := re.search(r"\ba class(?: or null)? \(got '(\w+)'\)$", sentence):
            sentence += did_you_mean(wrong[1], {cls.__name__ for cls in _subclasses(_BASES)})
        return sentence

    def _no_option(self, name: str) -> str:
        plain = name.removeprefix("--")
        if any(plain in parser.option_names() for parser in self._subcommands().values()):
            return f"{name!r} goes after the subcommand, or below its name in a file"
        near = nearest(self._below_subcommand(plain), self.option_names())
        dashes = "--" if name.startswith("--") else ""
        return f"there is no option {name!r}" + (f"; did you mean {dashes + near!r}?" if near else "; --help lists all")

    def _below_subcommand(self, name: str) -> str:
        root, _, rest = name.partition(".")
        return rest if root in self._subcommands() else name

    def _subcommands(self) -> dict[str, TrainerParser]:
        found = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for choices in found for name, parser in choices.items()}

    def option_names(self) -> set[str]:
        """Return the names of the options, without dashes, and of the subcommands."""
        names = {action.dest for action in self._actions} | self._subcommands().keys()
        return {name for name in names if name.rpartition(".")[2] != "help" and name != argparse.SUPPRESS}

    def check_environment(self) -> None:
        """Refuse an environment variable that begins as this parser's do, and names no option.

        Raises:
            ArgumentError: see :meth:`error`.
        """
        prefix = f"{self.env_prefix}_".upper()
        known = {f"{prefix}{name.replace('.', '__').upper()}" for name in self.option_names()}
        for name in os.environ:
            if name.startswith(prefix) and name not in known:
                self.error(f"the environment variable {name} names no option{did_you_mean(name, known)}")


def _is_option(key: str, known: set[str]) -> bool:
    """Return whether a key of a file is an option, a part of one's value, or what several begin with."""
    groups = {name.rpartition(".")[0] for name in known}  # "trainer" is one: it holds options, and has no other parts
    return any(
        key.rstrip("+") == name or name.startswith(f"{key}.") or (key.startswith(f"{name}.") and name not in groups)
        for name in known
    )


def _subclasses(classes: Iterable[type]) -> Iterator[type]:
    for cls in classes:
        yield cls
        yield from _subclasses(cls.__subclasses__())
