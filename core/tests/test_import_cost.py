"""What an import of torchhal drags in, each in a fresh interpreter. Times are for benchmarks/discovery.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchhal

pytestmark = pytest.mark.cold_start


def modules_after(program: str) -> set[str]:
    """Top-level packages that ``program`` adds to a bare interpreter."""
    before = "import sys; before = set(sys.modules)"
    after = "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{program}\n{after}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_import_torchhal() -> None:
    third_party = modules_after("import torchhal") - set(sys.stdlib_module_names)
    assert third_party == {"torchhal"}


def test_import_torchhal_is_not_even_much_of_the_standard_library() -> None:
    assert not modules_after("import torchhal") & {"typing", "re", "inspect", "dataclasses", "importlib"}


@pytest.mark.parametrize("name", ["plugin", "errors", "registry", "hints", "builtin"])
def test_modules_without_torch(name: str) -> None:
    added = modules_after(f"import torchhal.{name}")
    assert not added & {"torch", "numpy", "importlib_metadata", "packaging", "pytest"}


def test_a_built_in_alias_needs_no_metadata_reader() -> None:
    added = modules_after("import torchhal; torchhal.registry.find('strategy', 'ddp')")
    assert not added & {"torch", "importlib_metadata", "packaging", "email"}


def test_a_scan_imports_no_torch() -> None:
    added = modules_after("import torchhal; torchhal.plugins(); torchhal.registry.aliases('strategy')")
    assert "importlib_metadata" in added
    assert not added & {"torch", "numpy"}


def test_public_names() -> None:
    for name in ("Component", "Availability", "hookimpl", "register", "plugins"):
        assert getattr(torchhal, name).__module__.startswith(("torchhal", "pluggy")) or name == "hookimpl"
        assert name in dir(torchhal)
    assert set(torchhal.__all__) - {"__version__"} == set(torchhal._MODULES)


@pytest.mark.parametrize("name", sorted(torchhal._MODULES))
def test_every_public_name_exists(name: str) -> None:
    value = getattr(torchhal, name)
    assert getattr(value, "__name__", name) in (name, "HookimplMarker")


def test_a_submodule_needs_no_import_of_its_own() -> None:
    assert "torchhal" in modules_after("import torchhal; torchhal.registry.find; torchhal.errors.TorchhalError")


def test_unknown_names() -> None:
    for name in ("Trainr", "no_such_module", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'torchhal' has no attribute '{name}'"):
            getattr(torchhal, name)
    assert not hasattr(torchhal, "torch")


def test_a_missing_dependency_of_a_submodule_is_not_hidden() -> None:
    program = (
        "import sys, torchhal; sys.modules['pluggy'] = None\ntry: torchhal.plugin\nexcept ImportError: print('seen')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "seen\n"


def test_the_version_is_that_of_the_project_file() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [torchhal.__version__]
