"""Examine this installation, or a run that hung: ``torchhal doctor``."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torchhal
from torchhal._terminal import echo, printable
from torchhal.cli import _hang_report as hang_report
from torchhal.cli._output import output_to_stderr, print_json
from torchhal.errors import TorchhalError
from torchhal.plugin import KINDS
from torchhal.registry import Registry, RegistryEntry

_T = TypeVar("_T")

_ENVIRONMENT: Final = re.compile(
    r"(TORCHHAL|TORCHELASTIC|TORCH|MASTER|SLURM|PMI|OMPI|GLOO)_\w+"
    r"|((LOCAL|GROUP|NODE|ROLE)_)?(RANK|WORLD_SIZE)|(OMP|MKL)_NUM_THREADS"
    r"|\w+_(VISIBLE_DEVICES|SOCKET_IFNAME)|PYTHONPATH"
)
_SECRET: Final = re.compile("TOKEN|JWT|SECRET|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal doctor`` to its parser."""
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="a run whose ranks waited in vain: who for whom")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.run_dir is not None:
        return hang_report.report(arguments.run_dir, as_json=arguments.json)
    with output_to_stderr():
        found = examine(os.environ)
    if arguments.json:
        print_json(found)
        return 0
    echo("\n".join(map(printable, _examination(found))))
    return 0


LOCAL: Final = "torchhal/local"
"""The cluster environment of a process that wasn't started for a job."""


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
        yield from (f"    problem: {problem}" for problem in plugin.get("problems", ()))
    if not found["plugins"]:
        yield "  none"
    yield "accelerators:"
    for part in found["accelerators"]:
        yield f"  {part['name']} {'available' if part['available'] else 'not available: ' + part['reason']}"
    yield "devices:"
    yield from (f"  {device['name']} {_stats(device['stats'])}" for device in found["devices"])
    if not found["devices"]:
        yield "  none"
    if found["unavailable"]:
        yield "other components that can't be used here:"
    yield from (f"  {part['kind']} {part['name']}: {part['reason']}" for part in found["unavailable"])
    yield "cluster environments:"
    somebody = any(part["detected"] for part in found["cluster_environments"])
    for part in found["cluster_environments"]:
        state = "detected" if part["detected"] else "not detected"
        if part["name"] == LOCAL and not somebody:
            state = "used: no cluster is detected, torchhal starts the processes on this machine"
        yield f"  {part['name']} {state}{': ' + part['reason'] if part['reason'] else ''}"
    yield "recommendations:"
    yield from (f"  {sentence}" for sentence in found["recommendations"] or ["none"])
    yield "diagnostics:"
    for part in found["diagnostics"]:
        name = f"  {part['kind']} {part['name']}"
        yield from (f"{name}: {sentence}" for sentence in part["sentences"])
        if part["problem"]:
            yield f"{name} failed: {part['problem']}"
    if not found["diagnostics"]:
        yield "  none"


def _stats(stats: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in stats.items()) or "has no readings"


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what ``torchhal doctor --json`` prints. Imports torch and every accelerator, and survives their errors."""
    import platform

    from torchhal.registry._plugin_loader import STRICT

    # All problems are to be listed, so the first one doesn't raise.
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
        "devices": [device for entry in registry.entries("accelerator") for device in _devices(entry)],
        "unavailable": [
            part
            for kind in ("precision", "checkpoint_io", "strategy")
            for entry in registry.entries(kind)
            for part in _unavailable(entry)
        ],
        "cluster_environments": [_environment(entry) for entry in registry.entries("cluster_environment")],
        "recommendations": [
            *_guarded(lambda: _undriven(registry), lambda reason: []),
            *(text for entry in registry.entries("cluster_environment") for text in _advice(entry)),
            *(_undeclared(entry) for entry in registry.entries("cluster_environment") if _is_undeclared(entry)),
        ],
        "diagnostics": diagnostics(registry),
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


def _accelerator(entry: RegistryEntry) -> dict[str, Any]:
    def ask() -> tuple[bool, str]:
        state = entry.availability() and entry.load().availability()
        return state.ok, state.reason

    available, reason = _guarded(ask, lambda reason: (False, reason))
    return {"name": entry.qualified_name, "available": available, "reason": reason}


def _unavailable(entry: RegistryEntry) -> list[dict[str, str]]:
    """Return why a component can't be used here, as a list of one; empty where it can."""

    def ask() -> str:
        from torchhal.resolve import availability_of

        state = entry.availability() and availability_of(entry.load())
        return "" if state else state.reason

    reason = _guarded(ask, lambda reason: reason)
    kind = entry.kind.replace("_", " ")
    return [{"kind": kind, "name": entry.qualified_name, "reason": reason}] if reason else []


def _devices(entry: RegistryEntry) -> list[dict[str, Any]]:
    """Return the readings of each device of an accelerator that is available."""

    def ask() -> list[dict[str, Any]]:
        if not (entry.availability() and entry.load().availability()):
            return []
        accelerator = entry.create()
        devices = dict.fromkeys(accelerator.get_parallel_devices(range(accelerator.device_count())))
        return [
            {"name": f"{entry.qualified_name} {device}", "stats": accelerator.device_stats(device)}
            for device in devices
        ]

    return _guarded(ask, lambda reason: [])


def diagnostics(registry: Registry) -> list[dict[str, Any]]:
    """Return what the installed components of all kinds report, without those that report nothing.

    A component whose class can't be imported, or whose ``diagnostics()`` fails, is there with the reason as its
    ``problem``.
    """
    if _guarded(_torch_version, lambda reason: "") == "":
        return []  # no component can be imported without torch, which is reported once
    return [part for kind in KINDS for entry in registry.entries(kind) for part in _diagnosis(entry)]


def _diagnosis(entry: RegistryEntry) -> list[dict[str, Any]]:
    def ask() -> tuple[list[str], str]:
        if not entry.availability():
            return [], ""
        found = entry.load().diagnostics()
        if isinstance(found, list) and all(isinstance(sentence, str) for sentence in found):
            return found, ""
        return [], f"diagnostics() must return a list of str (got {found!r})"

    sentences, problem = _guarded(ask, lambda reason: ([], reason))
    if not sentences and not problem:
        return []
    return [{"kind": entry.kind, "name": entry.qualified_name, "sentences": sentences, "problem": problem}]


def _environment(entry: RegistryEntry) -> dict[str, Any]:
    def ask() -> tuple[bool, str]:
        state = entry.availability()
        return state.ok and bool(entry.load().detect()), state.reason

    detected, reason = _guarded(ask, lambda reason: (False, reason))
    return {"name": entry.qualified_name, "detected": detected, "reason": reason}


def _advice(entry: RegistryEntry) -> list[str]:
    def ask() -> list[str]:
        return entry.load().recommendations() if entry.availability() else []

    return _guarded(ask, lambda reason: [])


def _is_undeclared(entry: RegistryEntry) -> bool:
    from torchhal.registry._discovery import CORE, USER

    return not entry.variables and entry.distribution not in (CORE, USER)


def _undeclared(entry: RegistryEntry) -> str:
    from torchhal.registry._declarations import DETECT

    alias = entry.component.alias
    value = alias.replace("-", "_")  # build backends refuse a dash
    return (
        f"cluster environment {entry.qualified_name!r} is used when it is named only, as plugins={alias!r} or "
        f"TORCHHAL_CLUSTER={alias}: {entry.distribution} declares no environment variable that announces it. To its "
        f'pyproject.toml belongs [project.entry-points."{DETECT}"] with VARIABLE = "{value}"'
    )


def _guarded(ask: Callable[[], _T], otherwise: Callable[[str], _T]) -> _T:
    """Return ``ask()``, or ``otherwise(reason)`` when that fails: the command must not fail."""
    from torchhal.registry._discovery import describe

    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except TorchhalError as error:
        return otherwise(str(error))
    except BaseException as error:
        return otherwise(describe(error))
