"""Send what runs have logged and their services didn't get: ``torchhal sync-logs``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from pathlib import Path

from torchhal.errors import ConfigurationError, TorchhalError, message_of
from torchhal_loggers.service import ServiceLogger


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument(
        "folder", nargs="+", type=Path, help="the folder of a run, or of one service in it; or one with several runs"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a service (default: 60)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Send, and return 0 if the services have everything, else 1."""
    code = 0
    for folder in arguments.folder:
        found = sorted({path.parent for path in folder.rglob("records.jsonl")})
        if not found:
            print(f"torchhal sync-logs: {str(folder)!r} holds no records of a service", file=sys.stderr)
            code = 1
        for service_folder in found:
            code |= _send(service_folder, arguments.timeout)
    return code


def _send(folder: Path, timeout: float) -> int:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            left = load(folder).send_pending(timeout)
    except (TorchhalError, OSError, ValueError, TypeError) as error:
        print(f"{folder}: {message_of(error)}", file=sys.stderr)
        return 1
    for warning in caught:
        print(f"{folder}: {warning.message}", file=sys.stderr)
    print(f"{folder}: {f'{left} records are still to be sent' if left else 'everything is sent'}")
    return 1 if left else 0


def load(folder: Path) -> ServiceLogger:
    """Return a logger for the run whose records are in ``folder``.

    Raises:
        ConfigurationError: the folder isn't one that a ServiceLogger has made.
    """
    try:
        state = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        module, name = state["logger"].split(":")
        cls, options = getattr(importlib.import_module(module), name), dict(state["options"])
    except (OSError, ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
        raise ConfigurationError(f"{str(folder / 'run.json')!r} doesn't say which logger made it: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, ServiceLogger)):
        raise ConfigurationError(f"{str(folder / 'run.json')!r} names {state['logger']!r}, which is no ServiceLogger")
    for argument, value in options.items():
        if isinstance(value, dict) and list(value) == ["withheld"]:
            options[argument] = _secret(argument, value["withheld"])
    return cls.from_folder(folder, options)


def _secret(argument: str, variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigurationError(
            f"the run's folder doesn't keep {argument!r} of its logger, which has a secret in it: set {variable}"
        )
    return value
