"""Discover one plugin in a fresh Python, as a script, and write the changes of the process to a JSON file.

It imports nothing but the standard library and torchhal, for what it measures is what a mere listing costs.
Arguments: the file to write to, sys.path as JSON, the distribution, the entry point's name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from typing import Any

SUSPICIOUS = {
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "urllib.Request",
}  # fmt: skip
SCANS = 100


def state() -> dict[str, Any]:
    handlers = {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}
    root = logging.getLogger()
    return {
        "os.environ": dict(os.environ),
        "sys.path": list(sys.path),
        "the warnings filters": [repr(one) for one in warnings.filters],
        "the signal handlers": handlers,
        "the root logger": [root.level, [repr(one) for one in root.handlers]],
        "Python's random state": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "the current folder": os.getcwd(),
        "the umask": _umask(),
    }


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def counts() -> dict[str, int]:
    descriptors = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return {
        "file descriptors": len(os.listdir(descriptors)) if os.path.isdir(descriptors) else 0,
        "threads": threading.active_count(),
        "modules": len(sys.modules),
    }


def strange(name: str) -> bool:
    """Return True if an entry of sys.modules is not the module of that name."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is None or spec.name != name


def main(target: str, path: str, distribution: str, plugin: str) -> None:
    sys.path[:] = json.loads(path)
    # ignored signals are inherited from a parent that the manifest may have changed
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    import importlib_metadata

    from torchhal import registry
    from torchhal.errors import AmbiguousAliasError
    from torchhal.plugin import HOOKS, PROJECT, Hookspecs
    from torchhal.registry import _discovery as discovery

    installed: Any = importlib_metadata.distribution(distribution)

    def fresh(environ: dict[str, str] | None = None, *others: Any) -> registry.Registry:
        return registry.Registry(distributions=lambda: [installed, *others], environ=environ or {})

    registry.find("accelerator", "cpu")
    found = discovery.find_plugins([installed])  # pulls in what reading metadata needs
    point = next(one.entry_point for one in found if one.name == plugin)
    assert point is not None
    facts: dict[str, Any] = {
        "manifest": point.module,
        "requires_dist": list(installed.metadata.get_all("Requires-Dist") or []),
    }

    fresh({"TORCHHAL_DISABLE_PLUGINS": distribution}).plugins()
    facts["imported although disabled"] = sorted(
        name for name in sys.modules if name == point.module or name.startswith(f"{point.module.partition('.')[0]}.")
    )

    events: list[str] = []
    listening = True

    def hook(event: str, arguments: Any) -> None:
        if listening and event in SUSPICIOUS:
            events.append(f"{event} {arguments!r:.100}")

    sys.addaudithook(hook)
    before, modules = state(), set(sys.modules)
    with tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        sys.stderr.flush()
        own = os.dup(1), os.dup(2)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        try:
            record = next(one for one in fresh().plugins() if one.name == plugin)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(own[0], 1)
            os.dup2(own[1], 2)
        printed.seek(0)
        facts["printed"] = printed.read().decode(errors="replace")
    listening = False
    added = set(sys.modules) - modules
    after = state()
    facts |= {
        "record": record.to_dict(),
        "components": _table(record),
        "problems": [entry.problem for entry in record.components if entry.problem],
        "changed": [
            f"{what}: {before[what]!r:.200} became {after[what]!r:.200}"
            for what in before
            if before[what] != after[what]
        ],
        "modules": sorted({name.partition(".")[0] for name in added}),
        "strange modules": sorted(name for name in added if strange(name)),
        "events": events,
    }
    again = [next(one for one in fresh().plugins() if one.name == plugin) for _ in range(2)]
    facts["components again"] = [_table(one) for one in again]
    first = counts()
    for _ in range(SCANS):
        one = fresh()
        one.plugins()
        for entry in record.components:
            if not entry.problem:
                one.find(entry.kind, entry.component.alias)
    last = counts()
    facts["growth"] = {name: last[name] - first[name] for name in first if last[name] > first[name]}

    facts["hooks"] = {}
    manifest = sys.modules.get(point.module)
    if manifest is not None:
        import inspect

        import pluggy

        manager = pluggy.PluginManager(PROJECT)
        for name in dir(manifest):
            options = manager.parse_hookimpl_opts(manifest, name)
            if options is not None:
                hookname = options.get("specname") or name
                function = getattr(manifest, name)
                allowed = (
                    set(inspect.signature(getattr(Hookspecs, hookname)).parameters) - {"self"}
                    if hookname in HOOKS.values()
                    else set()
                )
                names = [
                    p.name
                    for p in inspect.signature(function).parameters.values()
                    if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                ]
                facts["hooks"][name] = {
                    "known": hookname in HOOKS.values(),
                    "unknown arguments": [n for n in names if n not in allowed],
                }

    facts["beside a twin"] = []
    with tempfile.TemporaryDirectory() as folder:
        twin = _twin(folder, record)
        sys.path.append(folder)
        both = fresh(None, *importlib_metadata.distributions(path=[folder]))
        for entry in record.components:
            alias = entry.component.alias
            try:
                both.find(entry.kind, alias)
                facts["beside a twin"].append(f"{entry.kind} {alias!r} is found as if it were the only one")
            except AmbiguousAliasError:
                for owner in (distribution, twin):
                    try:
                        both.find(entry.kind, f"{owner}/{alias}")
                    except Exception as error:
                        facts["beside a twin"].append(f"{owner}/{alias}: {error}")
            except Exception as error:
                facts["beside a twin"].append(f"{entry.kind} {alias!r}: {type(error).__name__}: {error}")
    with open(target, "w", encoding="utf-8") as file:
        json.dump(facts, file)


def _table(record: Any) -> list[list[Any]]:
    return [[entry.kind, entry.component.alias, entry.component.target] for entry in record.components]


def _twin(folder: str, record: Any) -> str:
    """Write a distribution to ``folder`` whose plugin claims the same aliases; return its name."""
    from torchhal.plugin import HOOKS

    kinds = sorted({entry.kind for entry in record.components})
    lines = ["from torchhal.plugin import Component, hookimpl"]
    for kind in kinds:
        aliases = [entry.component.alias for entry in record.components if entry.kind == kind]
        lines += [
            "@hookimpl",
            f"def {HOOKS[kind]}():",
            f"    return [Component(alias, 'twin:Component') for alias in {aliases!r}]",
        ]
    with open(os.path.join(folder, "torchhal_conformance_twin.py"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    info = os.path.join(folder, "torchhal_conformance_twin-1.0.dist-info")
    os.mkdir(info)
    with open(os.path.join(info, "METADATA"), "w", encoding="utf-8") as file:
        file.write("Metadata-Version: 2.1\nName: torchhal-conformance-twin\nVersion: 1.0\n")
    with open(os.path.join(info, "entry_points.txt"), "w", encoding="utf-8") as file:
        file.write("[torchhal]\ntwin = torchhal_conformance_twin\n")
    return "torchhal-conformance-twin"


if __name__ == "__main__":
    main(*sys.argv[1:])
