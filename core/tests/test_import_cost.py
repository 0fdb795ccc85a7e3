"""What an import of torchhal drags in, each in a fresh interpreter. Times are for benchmarks/discovery.py."""

from __future__ import annotations

import ast
import os
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


def test_import_loads_little_stdlib() -> None:
    """import torchhal does not even import much of the standard library."""
    assert not modules_after("import torchhal") & {"typing", "re", "inspect", "dataclasses", "importlib"}


@pytest.mark.parametrize("name", ["plugin", "errors", "registry", "registry._hints", "registry._builtin"])
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


WITHOUT_POSIX = """
import importlib, os, pkgutil, signal, sys
import torchhal

def load():  # fork_server_main is a script of its own, for where there is a fork
    found = pkgutil.walk_packages(torchhal.__path__, "torchhal.")
    names = [one.name for one in found if not one.name.endswith((".__main__", ".fork_server_main"))]
    for name in names:
        importlib.import_module(name)
    return names

load()  # what they need of others is there now
for name in [name for name in sys.modules if name.partition(".")[0] == "torchhal"]:
    del sys.modules[name]
there = {"signal", "SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
for name in dir(signal):
    if name.startswith(("SIG", "sig", "pthread_", "setitimer", "alarm")) and name not in there:
        delattr(signal, name)
for name in dir(os):
    if name in (
        "fork", "register_at_fork", "killpg", "setsid", "sched_getaffinity", "mkfifo", "O_CLOEXEC", "O_NOFOLLOW",
        "O_NONBLOCK", "O_DIRECTORY", "WNOHANG",
    ) or name.startswith(("get", "set")) and name.endswith(("uid", "gid", "pgid")):
        delattr(os, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
    sys.modules[name] = None
assert len(load()) > 150
"""


def test_import_without_posix_names() -> None:
    """Every module can be imported without the names that Windows lacks."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_type_checkers_know_the_same_names() -> None:
    stub = ast.parse((Path(torchhal.__file__).with_suffix(".pyi")).read_text())
    names = {
        name.asname: f"{node.module}" for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert names == {name: f"torchhal.{module}" for name, module in torchhal._MODULES.items()}


@pytest.mark.slow
def test_a_type_checker_knows_what_comes_back(tmp_path: Path) -> None:
    """``load_from_checkpoint`` gives an object of the class that it is called on."""
    (tmp_path / "program.py").write_text(
        "import torchhal\nfrom torchhal import DataModule, Module, Trainer\n"
        "class Net(Module): ...\nclass Data(DataModule): ...\n"
        "reveal_type(Net.load_from_checkpoint('x'))\nreveal_type(Data.load_from_checkpoint('x'))\n"
        "reveal_type(Trainer(max_epochs=3))\nreveal_type(torchhal.__version__)\nTrainer(gpus=2)\ntorchhal.Trainr\n"
    )
    source = Path(torchhal.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(source)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    revealed = re.findall(r'Revealed type is "(.*?)"', done.stdout)
    assert revealed == ["program.Net", "program.Data", "torchhal.trainer.trainer.Trainer", "str"], done.stdout
    assert 'Unexpected keyword argument "gpus"' in done.stdout and '"Trainr"' in done.stdout


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


def test_dir_lists_public_names() -> None:
    """Before any was used, and after."""
    program = (
        "import rlcompleter, torchhal; complete = rlcompleter.Completer({'torchhal': torchhal}).complete\n"
        "for _ in range(2):\n"
        "    print(*dir(torchhal))\n"
        "    print(*[complete('torchhal.Tr', i) for i in range(2)])\n"
        "    torchhal.registry, torchhal.plugins"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, completed, *again = done.stdout.splitlines()
    assert again == [first, completed]
    assert {name for name in first.split() if not name.startswith("__")} == set(torchhal.__all__) - {"__version__"}
    assert completed.startswith("torchhal.Trainer")


def test_unknown_names() -> None:
    for name in ("Trainr", "no_such_module", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'torchhal' has no attribute '{name}'"):
            getattr(torchhal, name)
    assert not hasattr(torchhal, "torch")


def test_missing_dependency_surfaces() -> None:
    """A missing dependency of a submodule is not hidden."""
    program = (
        "import sys, torchhal; sys.modules['pluggy'] = None\ntry: torchhal.plugin\nexcept ImportError: print('seen')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "seen\n"


def test_the_version_is_that_of_the_project_file() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [torchhal.__version__]
