"""The ``torchhal`` command.

A sub-command is a function that adds its parser and sets ``run``, a function from the parsed arguments to the exit
code; it stands in :data:`COMMANDS`. Errors of torchhal end in one ``error:`` line and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torchhal
from torchhal._terminal import echo, printable
from torchhal.commands import hangs, memory
from torchhal.commands.checkpoint import add_checkpoint
from torchhal.commands.conformance import add_conformance
from torchhal.commands.new import add_new
from torchhal.errors import ConfigurationError, TorchhalError, UnknownAliasError

if TYPE_CHECKING:
    from torchhal.registry import Registry
    from torchhal.registry._entry import Entry
    from torchhal.registry._plugin_loader import PluginRecord

    Parsers = argparse._SubParsersAction["_Parser"]

_T = TypeVar("_T")


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today is ambiguous when a later version adds an option.
        super().__init__(allow_abbrev=False, **options)


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; the exit code."""
    parser = _Parser(prog="torchhal", description="Train on any hardware, by plugin.")
    parser.add_argument("--version", action="version", version=f"torchhal {torchhal.__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(parsers)
    arguments = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a plugin's reason may be in letters that this locale lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe can still be caught
        return code
    except TorchhalError as error:
        between = "; " if isinstance(error, UnknownAliasError) else " "  # its lines are sentences of their own
        lines = (printable(" ".join(line.split())) for line in str(error).splitlines())
        print("error:", between.join(lines), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough. Python flushes once more at exit; let that go nowhere.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


# -- plugins -------------------------------------------------------------------------------------------------


def _add_plugins(parsers: Parsers) -> None:
    parser = parsers.add_parser("plugins", help="list installed plugins and what they provide")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.add_argument("--no-import", action="store_true", help="read metadata only; run no plugin's code")
    parser.set_defaults(run=_plugins)


def _plugins(arguments: argparse.Namespace) -> int:
    from torchhal import registry

    with output_to_stderr():
        records = registry.installed() if arguments.no_import else registry.plugins()
    if arguments.json:
        print_json({"schema": 1, "torchhal": torchhal.__version__, "plugins": [record.to_dict() for record in records]})
    else:
        echo("\n".join(map(printable, _listing(records))) or NO_PLUGINS)
    return 0


NO_PLUGINS: Final = "no plugins are installed; core's own parts are always there"


def _listing(records: list[PluginRecord]) -> Iterator[str]:
    for record in records:
        yield str(record).removeprefix("plugin ")
        for entry in record.components:
            part = entry.to_dict()
            other = f" ({', '.join(part['aliases'])})" if part["aliases"] else ""
            yield f"  {part['kind']} {part['alias']}{other}: {part['summary'] or part['target']}"
            if not part["available"]:
                yield f"    not available: {part['reason']}"


# -- doctor --------------------------------------------------------------------------------------------------

_ENVIRONMENT: Final = re.compile(
    r"(TORCHHAL|TORCHELASTIC|TORCH|MASTER|SLURM|PMI|OMPI|GLOO)_\w+"
    r"|((LOCAL|GROUP|NODE|ROLE)_)?(RANK|WORLD_SIZE)|(OMP|MKL)_NUM_THREADS"
    r"|\w+_(VISIBLE_DEVICES|SOCKET_IFNAME)|PYTHONPATH"
)
_SECRET: Final = re.compile("TOKEN|JWT|SECRET|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)


def _add_doctor(parsers: Parsers) -> None:
    parser = parsers.add_parser(
        "doctor", help="show versions, plugins, what hardware can be used and why not; or why a run hung"
    )
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="a run whose ranks waited in vain: who for whom")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.run_dir is not None:
        return hangs.report(arguments.run_dir, as_json=arguments.json)
    with output_to_stderr():
        found = examine(os.environ)
    if arguments.json:
        print_json(found)
        return 0
    echo("\n".join(map(printable, _examination(found))))
    return 0


LOCAL: Final = "torchhal/local"
"""The cluster environment of a process that nobody has started for a job."""


def _examination(found: Mapping[str, Any]) -> Iterator[str]:
    for title in ("versions", "environment"):
        yield f"{title}:"
        yield from (f"  {name} {value}" for name, value in found[title].items())
        if not found[title]:
            yield "  none"
    yield "plugins:"
    for plugin in found["plugins"]:
        reason = f": {plugin['reason']}" if plugin["reason"] else ""
        yield f"  {plugin['name']} ({plugin['distribution']} {plugin['version']}) {plugin['status']}{reason}"
    if not found["plugins"]:
        yield "  none"
    yield "accelerators:"
    for part in found["accelerators"]:
        yield f"  {part['name']} {'available' if part['available'] else 'not available: ' + part['reason']}"
    yield "cluster environments:"
    somebody = any(part["detected"] for part in found["cluster_environments"])
    for part in found["cluster_environments"]:
        state = "detected" if part["detected"] else "not detected"
        if part["name"] == LOCAL and not somebody:
            state = "used: no cluster is detected, torchhal starts the processes on this machine"
        yield f"  {part['name']} {state}{': ' + part['reason'] if part['reason'] else ''}"
    yield "recommendations:"
    yield from (f"  {sentence}" for sentence in found["recommendations"] or ["none"])


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """What ``torchhal doctor --json`` prints. Imports torch and every accelerator, and survives what they do."""
    import platform

    from torchhal.registry import Registry
    from torchhal.registry._plugin_loader import STRICT

    # Who runs a doctor wants to see all that is wrong, so nothing is raised for the first of it.
    registry = Registry(environ={**environ, STRICT: "0"})
    return {
        "schema": 1,
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": _guarded(_torch_version, lambda reason: f"can't be imported: {reason}"),
            "torchhal": torchhal.__version__,
        },
        "plugins": [record.to_dict() for record in registry.plugins()],
        "accelerators": [_accelerator(entry) for entry in registry.entries("accelerator")],
        "cluster_environments": [_environment(entry) for entry in registry.entries("cluster_environment")],
        "recommendations": [
            *_guarded(lambda: _undriven(registry), lambda reason: []),
            *(text for entry in registry.entries("cluster_environment") for text in _advice(entry)),
        ],
        "environment": {
            name: "(hidden)" if _SECRET.search(name) else value
            for name, value in sorted(environ.items())
            if _ENVIRONMENT.fullmatch(name)
        },
    }


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _undriven(registry: Registry) -> list[str]:
    from torchhal.resolve._accelerator_choice import undriven_device

    device = undriven_device(registry.entries("accelerator"), registry.plugins())
    return [device] if device else []


def _accelerator(entry: Entry) -> dict[str, Any]:
    def ask() -> tuple[bool, str]:
        state = entry.availability() and entry.load().availability()
        return state.ok, state.reason

    available, reason = _guarded(ask, lambda reason: (False, reason))
    return {"name": entry.qualified_name, "available": available, "reason": reason}


def _environment(entry: Entry) -> dict[str, Any]:
    def ask() -> tuple[bool, str]:
        state = entry.availability()
        return state.ok and bool(entry.load().detect()), state.reason

    detected, reason = _guarded(ask, lambda reason: (False, reason))
    return {"name": entry.qualified_name, "detected": detected, "reason": reason}


def _advice(entry: Entry) -> list[str]:
    def ask() -> list[str]:
        return entry.load().recommendations() if entry.availability() else []

    return _guarded(ask, lambda reason: [])


def _guarded(ask: Callable[[], _T], otherwise: Callable[[str], _T]) -> _T:
    """``ask()``, or what ``otherwise`` makes of the reason when that fails in whatever way: a doctor must not die."""
    from torchhal.registry._discovery import describe

    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except TorchhalError as error:
        return otherwise(str(error))
    except BaseException as error:
        return otherwise(describe(error))


# -- explain -------------------------------------------------------------------------------------------------


def _add_explain(parsers: Parsers) -> None:
    parser = parsers.add_parser("explain", help="show which parts a Trainer with these arguments would use, and why")
    parser.add_argument("--accelerator", default="auto", metavar="ALIAS")
    parser.add_argument("--strategy", default="auto", metavar="ALIAS")
    parser.add_argument("--devices", default="auto", metavar="N", help="a count, indices such as 0,2, or auto")
    parser.add_argument("--num-nodes", type=_nodes, default=1, metavar="N", help="a count, or auto")
    parser.add_argument("--precision", default=None, metavar="ALIAS")
    parser.add_argument("--plugin", action="append", default=[], metavar="ALIAS", help="may be given several times")
    memory.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.set_defaults(run=_explain)


def _nodes(text: str) -> int | str:
    if text != "auto" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number or 'auto' (got {text!r})")
    return text if text == "auto" else int(text)


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.model_args is not None and arguments.model is None:
        raise ConfigurationError("'--model-args' are the arguments of a '--model', which is missing")
    with output_to_stderr():
        from torchhal.resolve import Request, resolve

        request = Request(
            accelerator=arguments.accelerator,
            strategy=arguments.strategy,
            devices=arguments.devices,
            num_nodes=arguments.num_nodes,
            precision=arguments.precision,
            plugins=tuple(arguments.plugin),
        )
        plan = resolve(request)
        found = None if arguments.model is None else memory.estimate(arguments, request, plan)
    if arguments.json:
        print_json(plan.to_dict() | ({} if found is None else {"memory": found}))
    else:
        echo(plan.describe())
        if found is not None:
            echo("\n".join(memory.lines(found)))
    return 0


COMMANDS: Final[tuple[Callable[[Parsers], None], ...]] = (
    _add_plugins,
    _add_doctor,
    _add_explain,
    add_checkpoint,
    add_conformance,
    add_new,
)


# -- output --------------------------------------------------------------------------------------------------


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """While other people's code is imported, send what it prints to stderr: Python's prints and those of C code.

    A command's own output, often JSON, is printed outside of this.
    """
    with contextlib.ExitStack() as stack:
        try:
            sys.stdout.flush()
            own = os.dup(1)
            stack.callback(os.close, own)
            stack.callback(os.dup2, own, 1)
            os.dup2(2, 1)
        except (AttributeError, OSError):  # no stdout, or no stderr: then there is nothing to keep apart
            pass
        else:
            # What C's stdio holds back has to leave before the descriptor is put back.
            stack.callback(_flush_c)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _flush_c() -> None:
    try:
        import ctypes

        ctypes.CDLL(None).fflush(None)
    except (ImportError, OSError, TypeError, AttributeError):  # no such library here, so nothing to flush
        pass


if __name__ == "__main__":
    sys.exit(main())
