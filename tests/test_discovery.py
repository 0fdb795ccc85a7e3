"""Plugins as users get them: built as wheels, installed by pip, found by processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.packaging

SOURCES = Path(__file__).parent / "distributions"
PLUGINS = ("broken", "exits", "incompatible", "prints", "slate", "twin_a", "twin_b")

# Building in one process saves starting Python for each wheel; what runs is the same backend that pip calls.
BUILD = """
import os, sys
from hatchling.build import build_wheel
for source in sys.argv[2:]:
    os.chdir(source)
    build_wheel(sys.argv[1])
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    copies = tmp_path_factory.mktemp("sources")
    sources = [str(shutil.copytree(SOURCES / name, copies / name)) for name in PLUGINS]
    subprocess.run([sys.executable, "-c", BUILD, str(folder), *sources], check=True, stdout=subprocess.DEVNULL)
    return folder


def install(wheels: Path, target: Path, *names: str) -> Path:
    files = [str(wheels / f"acme_{name}-1.0-py3-none-any.whl") for name in names]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-compile", "--target", str(target), *files], check=True)
    return target


@pytest.fixture(scope="module")
def site(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheels, tmp_path_factory.mktemp("site"), *PLUGINS)


# For what a program prints itself: what C code has printed comes out at exit, after everything else.
QUIET = {"TORCHHAL_DISABLE_PLUGINS": "prints"}


def python(*arguments: str, path: Path | str, **environ: str) -> subprocess.CompletedProcess[str]:
    # PYTHONUNBUFFERED takes away the buffer of C's stdio, too, and with it what there is to test about it.
    dropped = ("TORCHHAL_", "PYTHONUNBUFFERED")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    folders = [str(path), os.environ.get("PYTHONPATH", "")]
    environment = {**clean, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **environ}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def listed(path: Path | str, *arguments: str, **environ: str) -> dict[str, dict[str, Any]]:
    done = python("-m", "torchhal.cli", "plugins", "--json", *arguments, path=path, **environ)
    assert done.returncode == 0, done.stderr
    plugins = json.loads(done.stdout)["plugins"]  # the whole of stdout is one JSON document
    return {plugin["distribution"]: plugin for plugin in plugins if plugin["distribution"].startswith("acme-")}


def test_what_becomes_of_each(site: Path) -> None:
    plugins = listed(site)
    assert {name: plugin["status"] for name, plugin in plugins.items()} == {
        "acme-broken": "broken",
        "acme-exits": "broken",
        "acme-incompatible": "incompatible",
        "acme-prints": "loaded",
        "acme-slate": "loaded",
        "acme-twin-a": "loaded",
        "acme-twin-b": "loaded",
    }
    assert "No module named 'no_such_vendor_sdk'" in plugins["acme-broken"]["reason"]
    assert plugins["acme-exits"]["reason"].startswith("SystemExit: no licence found")
    assert "it requires torchhal>=99" in plugins["acme-incompatible"]["reason"]
    for name, plugin in plugins.items():
        assert plugin["version"] == "1.0"
        assert plugin["file"] == str(site / name.replace("-", "_") / "_plugin.py")
    slate, pro = plugins["acme-slate"]["components"]
    assert slate == {
        "kind": "accelerator",
        "alias": "slate",
        "aliases": ["tablet"],
        "target": "acme_slate.accelerator:SlateAccelerator",
        "summary": "A board of one core",
        "available": True,
        "reason": "",
    }
    assert (pro["available"], pro["reason"]) == (False, "the Python module 'no_such_vendor_sdk' is not installed")


def test_entry_points_that_nobody_can_read(site: Path, tmp_path: Path) -> None:
    """importlib.metadata.entry_points() raises for all distributions over one such file."""
    info = tmp_path / "unrelated-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unrelated\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"[console_scripts]\nx = \xff\n")
    path = f"{tmp_path}{os.pathsep}{site}"
    assert python("-c", "import importlib.metadata as m; m.entry_points()", path=path).returncode != 0
    assert {name: plugin["status"] for name, plugin in listed(path).items()} == {
        name: plugin["status"] for name, plugin in listed(site).items()
    }


def test_prints_reach_stderr(site: Path) -> None:
    done = python("-m", "torchhal.cli", "plugins", "--json", path=site)
    assert {"from python", "from a descriptor", "from c", "from a hook"} <= set(done.stderr.splitlines())


@pytest.mark.cold_start
def test_the_accelerator_is_used_by_its_alias(site: Path) -> None:
    program = """
import sys
from torchhal import registry
entry = registry.find("accelerator", "SLATE")
assert registry.find("accelerator", "tablet") is entry
assert entry.availability() and "torch" not in sys.modules
accelerator = entry.create()
device, = accelerator.get_parallel_devices(accelerator.parse_devices("auto"))
accelerator.setup_device(device)
print(type(accelerator).__module__, device, accelerator.compute(), entry.create(clock=1).compute())
"""
    done = python("-c", program, path=site, **QUIET)
    assert done.stdout.splitlines() == ["acme_slate.accelerator cpu 6.0 2.0"], done.stderr


def test_missing_vendor_module_is_named(site: Path) -> None:
    """A missing vendor's module is named when the component is used."""
    done = python("-c", "from torchhal import registry; registry.find('accelerator', 'slate_pro').load()", path=site)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("torchhal.errors.ComponentError: accelerator 'acme-slate/slate_pro' can't be used")
    assert "the Python module 'no_such_vendor_sdk' is not installed" in last


def test_one_alias_from_two_distributions(site: Path) -> None:
    program = """
from torchhal import registry
from torchhal.errors import AmbiguousAliasError
print([alias for alias in registry.aliases("strategy") if "twin" in alias or "only" in alias])
print(registry.find("strategy", "acme_twin_b/twin").component.target)
try:
    registry.find("strategy", "twin")
except AmbiguousAliasError as error:
    print(error)
"""
    done = python("-c", program, path=site, **QUIET)
    assert done.stdout.splitlines() == [
        "['acme-twin-a/twin', 'acme-twin-b/twin', 'only_a', 'only_b']",
        "acme_twin_b.part:Part",
        "the strategy 'twin' is provided by 2 plugins: write one of 'acme-twin-a/twin' and 'acme-twin-b/twin'",
    ], done.stderr


def test_nothing_depends_on_path_order_or_hash_seed(wheels: Path, tmp_path: Path) -> None:
    one = str(install(wheels, tmp_path / "one", "twin_b", "slate"))
    two = str(install(wheels, tmp_path / "two", "twin_a", "broken"))
    program = """
import json
from torchhal import registry
from torchhal.plugin import KINDS
records = [record.to_dict() | {"load_ms": 0} for record in registry.plugins()]
try:
    registry.find("strategy", "twim")
except LookupError as error:
    print(json.dumps([records, [registry.aliases(kind) for kind in KINDS], str(error)]))
"""
    outputs = {
        python("-c", program, path=os.pathsep.join(order), PYTHONHASHSEED=seed).stdout
        for order, seed in (((one, two), "1"), ((two, one), "2"), ((one, two), "3"))
    }
    assert len(outputs) == 1 and "acme-twin-a" in outputs.pop()


def test_disabled_plugins_are_not_imported(site: Path) -> None:
    plugins = listed(site, TORCHHAL_DISABLE_PLUGINS="Acme_Exits, broken,prints")
    assert {name for name, plugin in plugins.items() if plugin["status"] == "disabled"} == {
        "acme-exits",
        "acme-broken",
        "acme-prints",
    }
    done = python("-m", "torchhal.cli", "plugins", "--json", path=site, TORCHHAL_PLUGINS="slate")
    assert done.stderr == ""  # the one that prints has not been imported


def test_metadata_alone(site: Path) -> None:
    done = python("-m", "torchhal.cli", "plugins", "--json", "--no-import", path=site)
    plugins = {plugin["distribution"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert plugins["acme-slate"]["status"] == plugins["acme-broken"]["status"] == "found"
    assert plugins["acme-incompatible"]["status"] == "incompatible"
    assert plugins["acme-slate"]["components"] == [] and done.stderr == ""


def test_strict_mode(site: Path) -> None:
    done = python("-m", "torchhal.cli", "plugins", path=site, TORCHHAL_STRICT_PLUGINS="1")
    assert done.returncode == 2
    assert "error: plugin 'broken' (acme-broken 1.0) is broken: ModuleNotFoundError" in done.stderr


def test_installed_into_a_running_process(wheels: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    target.mkdir()
    program = """
import subprocess, sys
from torchhal import registry
for turn in range(3):
    try:
        print(turn, registry.find("accelerator", "slate"))
    except LookupError as error:
        print(turn, "refresh()" in str(error))
    if turn == 0:
        subprocess.run(sys.argv[1:], check=True)
    if turn == 1:
        registry.refresh()
"""
    wheel = str(wheels / "acme_slate-1.0-py3-none-any.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    done = python("-c", program, *pip, "--target", str(target), wheel, path=target)
    assert done.stdout.splitlines() == ["0 False", "1 True", "2 accelerator 'acme-slate/slate'"], done.stderr


def test_spawned_children_see_the_same(site: Path) -> None:
    program = """
import multiprocessing
from torchhal import registry

def table():
    return [registry.aliases(kind) for kind in ("accelerator", "strategy")]

if __name__ == "__main__":
    before = table()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(table) == before == table())
"""
    script = site.parent / "spawns.py"
    script.write_text(program)
    assert python(str(script), path=site, **QUIET).stdout == "True\n"


def test_a_fork_after_discovery_works(site: Path) -> None:
    program = """
import os
from torchhal import registry
registry.find("accelerator", "slate").availability()
if (child := os.fork()) == 0:
    import torch
    os._exit(0 if float(torch.ones(3).sum()) == 3 and registry.find("accelerator", "slate").create() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python("-c", program, path=site, **QUIET).stdout == "0\n"
