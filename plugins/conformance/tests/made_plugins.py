"""Plugins made on the spot: a sound one, and the same one broken in one way for each GEN check."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent, indent

import importlib_metadata

from torchhal.testing import isolated_registry
from torchhal_conformance import ComponentUnderTest

MANIFEST = """
from torchhal.plugin import Component, hookimpl
{top}

@hookimpl
def torchhal_accelerators({arguments}):
    {hook}
    return [Component("acme", "acme.part:Acme", defaults={defaults}, requires={requires}), *{more}]
"""
PART = """
{part_top}
from torchhal.accelerators import CPUAccelerator
from torchhal.plugin import Availability

class Acme(CPUAccelerator):
    name = "acme"

{members}
"""
LAZY_VENDOR = """
@classmethod
def availability(cls):
    try:
        import acme_sdk
    except Exception as error:
        return Availability(False, f"acme_sdk: {error}")
    return Availability(True)
"""


@dataclass(frozen=True)
class Plugin:
    """The pieces of a plugin's source that mutants change."""

    top: str = ""
    hook: str = "pass"
    arguments: str = ""
    defaults: str = "{}"
    requires: str = "()"
    more: str = "[]"
    tail: str = ""
    part_top: str = ""
    members: str = "pass"
    dependency: str = "torchhal>=0.1,<1"
    sdk: str | None = None
    init: str = ""
    sitecustomize: str = ""
    features: tuple[str, ...] = ()
    readme: str = ""
    declares: str = ""

    def write(self, folder: Path) -> None:
        package = folder / "acme"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(dedent(self.init))
        manifest = MANIFEST.format(
            top=dedent(self.top), hook=self.hook, arguments=self.arguments, defaults=self.defaults,
            requires=self.requires, more=self.more,
        )  # fmt: skip
        (package / "_plugin.py").write_text(manifest + dedent(self.tail))
        part = PART.format(part_top=dedent(self.part_top), members=indent(dedent(self.members).strip(), "    "))
        (package / "part.py").write_text(part)
        if self.sdk is not None:
            (folder / "acme_sdk.py").write_text(self.sdk)
        if self.sitecustomize:
            (folder / "sitecustomize.py").write_text(self.sitecustomize)
        info = folder / "torchhal_acme-1.0.dist-info"
        info.mkdir()
        requires = f"Requires-Dist: {self.dependency}\n" if self.dependency else ""
        head = f"Metadata-Version: 2.1\nName: torchhal-acme\nVersion: 1.0\n{requires}"
        (info / "METADATA").write_text(f"{head}\n{self.readme}")
        (info / "entry_points.txt").write_text(f"[torchhal]\nacme = acme._plugin\n{self.declares}")


SOUND = Plugin()
README = """
# ACME

```python
from torchhal import Trainer
```

<!-- no-run: needs two of them -->
```python
Trainer(accelerator="acme", devices=7)
```

```python
trainer = Trainer(accelerator="acme", devices=1, logger=False)
```
"""
WITH_README = Plugin(features=("readme",), readme=README)
WITH_ENVIRONMENT = Plugin(
    tail="""
    @hookimpl
    def torchhal_cluster_environments():
        return [Component("acme_run", "acme.part:AcmeRun")]
    """,
    part_top="""
    import os
    from torchhal.cluster import LocalEnvironment

    class AcmeRun(LocalEnvironment):
        name = "acme_run"

        @classmethod
        def detect(cls):
            return "ACME_RANK" in os.environ
    """,
    declares="[torchhal.detect]\nACME_RANK = acme_run\n[torchhal.auto]\nacme = torch\n",
)
WITH_SDK = Plugin(requires='("acme_sdk",)', members=LAZY_VENDOR, sdk="")

MUTANTS: list[tuple[str, str, Plugin]] = [
    ("GEN-01", "imports numpy", replace(SOUND, top="import numpy")),
    ("GEN-01", "imports its vendor", replace(WITH_SDK, top="import acme_sdk")),
    ("GEN-01", "takes its time", replace(SOUND, top="import time; time.sleep(0.06)")),
    (
        "GEN-02",
        "a probe that doesn't survive a fork",
        replace(
            SOUND,
            part_top="import os",
            members="""
            @classmethod
            def availability(cls):
                os.register_at_fork(after_in_child=lambda: os._exit(3))
                return Availability(True)
            """,
        ),
    ),
    ("GEN-03", "sets a variable", replace(SOUND, top="import os; os.environ['ACME'] = '1'")),
    ("GEN-03", "silences warnings", replace(SOUND, top="import warnings; warnings.simplefilter('ignore')")),
    ("GEN-03", "configures logging", replace(SOUND, top="import logging; logging.basicConfig()")),
    ("GEN-03", "takes a signal", replace(SOUND, hook="import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN)")),
    ("GEN-03", "seeds random", replace(SOUND, hook="import random; random.seed(0)")),
    (
        "GEN-03",
        "puts a stand-in into sys.modules",
        replace(SOUND, top="import sys, types; sys.modules['acme_shim'] = types.ModuleType('acme_shim')"),
    ),
    (
        "GEN-03",
        "changes torch where it is there",
        replace(SOUND, hook="import sys; 'torch' in sys.modules and sys.modules['torch'].set_num_threads(7)"),
    ),
    ("GEN-04", "imports its vendor in the manifest", replace(WITH_SDK, top="import acme_sdk")),
    (
        "GEN-05",
        "lets the vendor's error pass",
        replace(WITH_SDK, members=LAZY_VENDOR.replace("except Exception", "except ImportError")),
    ),
    ("GEN-05", "imports its vendor with the class", replace(WITH_SDK, part_top="import acme_sdk")),
    ("GEN-06", "takes the core's name", replace(SOUND, more='[Component("cpu", "acme.part:Acme")]')),
    ("GEN-06", "not a slug", replace(SOUND, more='[Component("Acme GPU", "acme.part:Acme")]')),
    ("GEN-06", "one alias twice", replace(SOUND, more='[Component("acme", "acme.part:Acme")]')),
    ("GEN-07", "another package's class", replace(SOUND, tail=dedent("""
        import importlib

        @hookimpl(specname="torchhal_accelerators")
        def torchhal_accelerators():
            return [Component("acme", "torchhal.accelerators.cpu:CPUAccelerator")]
     """))),
    ("GEN-08", "a misspelt hook", replace(SOUND, tail="""
        @hookimpl(optionalhook=True)
        def torchhal_acelerators():
            return []
     """)),
    ("GEN-09", "an argument that is never passed", replace(SOUND, arguments="config=None")),
    ("GEN-10", "a narrower method", replace(SOUND, members="def batch_to_device(self, batch): ...")),
    ("GEN-10", "asks for more", replace(SOUND, members="def synchronize(self, device, stream):\n    pass")),
    ("GEN-10", "another order", replace(SOUND, members="def set_rng_state(self, device, state):\n    pass")),
    ("GEN-10", "another result", replace(SOUND, members="def device_count(self) -> str:\n    return '1'")),
    ("GEN-10", "a value for a method", replace(SOUND, members="device_count = 1")),
    ("GEN-11", "defaults that fit nothing", replace(SOUND, defaults='{"speed": "high"}')),
    ("GEN-11", "an argument without default", replace(SOUND, members="def __init__(self, speed):\n    pass")),
    ("GEN-12", "no upper bound", replace(SOUND, dependency="torchhal>=0.1")),
    ("GEN-12", "no lower bound", replace(SOUND, dependency="torchhal<1")),
    ("GEN-12", "no requirement", replace(SOUND, dependency="")),
    ("GEN-12", "bounds for an extra", replace(SOUND, dependency='torchhal>=0.1,<1; extra == "all"')),
    (
        "GEN-13",
        "registers once",
        replace(SOUND, top="done = []", hook="if done: return [Component('b', 'acme.part:Acme')]\n    done.append(1)"),
    ),
    ("GEN-13", "changes each time", replace(SOUND, top="import os", more="[Component(f'a{os.getpid()}', 'a:A')]")),
    ("GEN-14", "imported when Python starts", replace(SOUND, sitecustomize="import acme._plugin")),
    ("GEN-15", "a private module", replace(SOUND, part_top="from torchhal.trainer import _internal")),
    ("GEN-15", "a name that is not listed", replace(SOUND, part_top="import torchhal.strategies.ddp")),
    ("GEN-15", "another of a listed module", replace(SOUND, part_top="import torchhal.rng\nx = torchhal.rng.Any")),
    ("GEN-15", "a private name", replace(SOUND, part_top="from torchhal import registry\nx = registry._default")),
    ("GEN-15", "a private method overridden", replace(SOUND, members="def _register(self):\n    pass")),
    ("GEN-16", "patches torch", replace(SOUND, part_top="import torch\ntorch.optim.Optimizer.step = None")),
    ("GEN-16", "patches torchhal", replace(SOUND, part_top="from torchhal import module\nmodule.Module = 1")),
    ("GEN-18", "an alias that can't be looked up", replace(SOUND, more='[Component("cpu", "acme.part:Acme")]')),
    (
        "GEN-19",
        "a lock in its state",
        replace(SOUND, members="def __init__(self):\n    import threading\n    self.lock = threading.Lock()"),
    ),
    ("GEN-20", "asks a server", replace(SOUND, hook="import socket; socket.getaddrinfo('localhost', 80)")),
    ("GEN-20", "starts a process", replace(SOUND, top="import subprocess; subprocess.run(['true'])")),
    ("GEN-21", "opens a file each time", replace(SOUND, top="files = []", hook="files.append(open(__file__))")),
    ("GEN-22", "prints", replace(SOUND, top="print('Welcome to ACME')")),
    ("GEN-22", "ends the process", replace(SOUND, top="raise SystemExit(1)")),
    ("GEN-23", "announces nothing", replace(WITH_ENVIRONMENT, declares="")),
    (
        "GEN-23",
        "announces what it doesn't have",
        replace(WITH_ENVIRONMENT, declares="[torchhal.detect]\nACME_RANK = acme_run\nACME_JOB = other\n"),
    ),
    (
        "GEN-23",
        "an unusable name",
        replace(WITH_ENVIRONMENT, declares="[torchhal.detect]\nACME_RANK = acme_run\nACME-JOB = acme_run\n"),
    ),
    (
        "GEN-23",
        "detects itself everywhere",
        replace(WITH_ENVIRONMENT, part_top=WITH_ENVIRONMENT.part_top.replace('"ACME_RANK" in os.environ', "True")),
    ),
    ("SYS-07", "another name in the README", replace(WITH_README, readme=README.replace('"acme"', '"akme"'))),
    ("SYS-07", "no README", replace(WITH_README, readme="")),
    ("SYS-07", "no Trainer", replace(WITH_README, readme="Install it and be happy.")),
    ("SYS-01", "makes something else", replace(SOUND, members="def __new__(cls):\n    return object()")),
]  # fmt: skip


@contextmanager
def installed(plugin: Plugin, folder: Path) -> Iterator[ComponentUnderTest]:
    """The plugin, written into ``folder`` and installed in this process and in those that it starts."""
    plugin.write(folder)
    distributions = importlib_metadata.distributions(path=[str(folder)])
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        with isolated_registry(distributions=distributions):
            yield ComponentUnderTest("accelerator", "acme", frozenset(plugin.features))
    finally:
        sys.path.remove(str(folder))
        os.environ["PYTHONPATH"] = before
        for name in [name for name in sys.modules if name.partition(".")[0] in ("acme", "acme_sdk", "acme_shim")]:
            del sys.modules[name]
