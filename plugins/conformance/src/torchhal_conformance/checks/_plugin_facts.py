"""Measure in a fresh Python what discovering a plugin does, once per plugin."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from torchhal.registry._plugin_loader import PluginRecord
from torchhal_conformance import _discovery_probe as discovery_probe
from torchhal_conformance._assertions import require
from torchhal_conformance._check import CheckFailed, NotApplicable
from torchhal_conformance._context import CheckContext

_ENVIRON: Final = dict(os.environ)  # as it was before any plugin was looked for


def plugin_record(context: CheckContext) -> PluginRecord:
    record = context.component.plugin
    if record is None:
        raise NotApplicable("the component comes from no plugin")
    return record


def discovery_facts(context: CheckContext) -> dict[str, Any]:
    """Return the effects of discovering the plugin in a fresh Python, measured once per plugin."""
    record = plugin_record(context)
    facts: dict[str, Any] = json.loads(measure_discovery(record.distribution, record.name, tuple(sys.path)))
    return facts


@functools.lru_cache(maxsize=16)
def measure_discovery(distribution: str, plugin: str, path: tuple[str, ...]) -> str:
    folders = json.dumps([os.path.abspath(folder) for folder in path])
    # pytest's variables and torchhal's own lists are this process's affair; what a manifest has set here is what the
    # fresh process must not have yet
    environ = {name: value for name, value in _ENVIRON.items() if not name.startswith(("TORCHHAL_", "PYTEST_"))}
    environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "facts.json")
        script = os.path.abspath(discovery_probe.__file__)
        done = subprocess.run(
            [sys.executable, "-s", script, target, folders, distribution, plugin],
            capture_output=True, text=True, check=False, timeout=120, env=environ,
        )  # fmt: skip
        if done.returncode or not os.path.exists(target):
            raise CheckFailed(f"discovery of {plugin!r} ended its process with code {done.returncode}:\n{done.stderr}")
        return Path(target).read_text(encoding="utf-8")


def require_loaded(facts: dict[str, Any]) -> None:
    record = facts["record"]
    require(record["status"] == "loaded", f"the plugin is {record['status']}: {record['reason']}")
