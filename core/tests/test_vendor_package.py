"""VendorPackage: a package of a vendor's, its version, its import, and each reason against it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchhal import rng
from torchhal.errors import ConfigurationError, LaunchError
from torchhal.vendor_package import VendorPackage, restored_environ

INSTALL = "pip install 'torchhal-acme[vendor]'"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that installs a distribution, as pip leaves it, with a module ``acme_sdk`` of this source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(version: str, source: str = "", name: str = "acme-sdk") -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        package = tmp_path / "acme_sdk"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(source)
        (package / "driver.py").write_text("answers = 42\n")

    yield install
    for module in [module for module in sys.modules if module.partition(".")[0] == "acme_sdk"]:
        del sys.modules[module]


def acme(**arguments: Any) -> VendorPackage:
    given = {"versions": ">=2.1,<3", "distributions": ("acme-sdk", "acme-sdk-stub"), **arguments}
    return VendorPackage("acme_sdk", plugin="torchhal-acme", install=INSTALL, **given)


def test_a_package_that_fits_is_checked_without_an_import_and_loaded(installed: Callable[..., None]) -> None:
    installed("2.2.0rc1")
    package = acme(submodules=("driver",))
    package.check()
    assert package.problem() == "" and package.installed() == ("acme-sdk", "2.2.0rc1")
    assert "acme_sdk" not in sys.modules
    module = package.load()
    assert module is sys.modules["acme_sdk"] is package.load()
    assert module.driver.answers == 42


def test_an_import_that_draws_random_numbers_changes_no_run(installed: Callable[..., None]) -> None:
    installed("2.2", source="import random, numpy, torch\nrandom.random(), numpy.random.rand(), torch.rand(1)\n")
    before = rng.collect_host()
    acme().load()
    after = rng.collect_host()
    assert torch.equal(after.pop("torch"), before.pop("torch")) and after["python"] == before["python"]
    assert after.get("numpy") == before.get("numpy", after.get("numpy"))


def test_a_package_that_is_not_installed() -> None:
    package = acme(needed_by="strategy 'acme'")
    message = f"strategy 'acme' needs the package acme_sdk, which is not installed: {INSTALL}"
    assert package.problem() == message
    for call in (package.check, package.load, package.load):
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert str(caught.value) == message


@pytest.mark.parametrize("version", ["2.0", "3.0", "3.1.dev0"])
def test_a_version_outside_the_range_is_not_imported(installed: Callable[..., None], version: str) -> None:
    installed(version, name="acme-sdk-stub")
    package = acme(error=LaunchError)
    for call in (package.check, package.load):
        with pytest.raises(LaunchError) as caught:
            call()
        assert str(caught.value) == (
            f"this torchhal-acme works with acme_sdk <3,>=2.1 (found acme-sdk-stub {version}): {INSTALL}"
        )
    assert "acme_sdk" not in sys.modules


def test_package_installed_after_failed_load(installed: Callable[..., None]) -> None:
    """As in a notebook, which goes on after ``pip install``: a missing package leaves no failure behind."""
    package = acme()
    with pytest.raises(ConfigurationError, match="not installed"):
        package.load()
    installed("2.2.0")
    importlib.invalidate_caches()
    assert package.load().__name__ == "acme_sdk"


def test_any_version_will_do_where_no_range_is_given(installed: Callable[..., None]) -> None:
    installed("0.0.1")
    assert acme(versions="").load().__name__ == "acme_sdk"


def test_a_version_that_is_none_is_not_compared(installed: Callable[..., None]) -> None:
    installed("of-tuesday")
    assert acme().problem() == ""


def test_messages_of_ones_own(installed: Callable[..., None]) -> None:
    missing = acme(not_installed="no {module} for torch {torch}, {versions}").problem()
    assert missing == f"no acme_sdk for torch {torch.__version__}, <3,>=2.1"
    installed("1.0")
    assert acme(wrong_version="{plugin}: {distribution} {version}").problem() == "torchhal-acme: acme-sdk 1.0"


def test_a_package_of_torchs_own_versions(installed: Callable[..., None]) -> None:
    installed("1.13.1")
    minor = ".".join(torch.__version__.split(".")[:2])
    assert acme(follows_torch=True, versions="").problem() == (
        f"acme-sdk 1.13.1 loads beside torch 1.13 only, and this is torch {torch.__version__}: install "
        f"'torch==1.13.*', or the acme-sdk of {minor}"
    )
    installed(f"{minor}.99", name="acme-sdk-stub")
    package = acme(follows_torch=True, versions="", distributions=("acme-sdk-stub",))
    assert package.problem() == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('libacme.so: cannot open shared object file')", "OSError: libacme.so: cannot open"),
        ("import no_such_module_of_acme", "ModuleNotFoundError: No module named 'no_such_module_of_acme'"),
        ("assert False, 'built for torch 2.0'", "AssertionError: built for torch 2.0"),
    ],
)
def test_an_import_that_fails_is_named_each_time_and_tried_once(
    installed: Callable[..., None], source: str, reason: str
) -> None:
    installed("2.2", f"import os\nos.environ['ACME_IMPORTS'] = os.environ.get('ACME_IMPORTS', '') + '.'\n{source}")
    package = acme(error=ImportError)
    with restored_environ("ACME_IMPORTS"):
        messages = []
        for _ in range(2):
            with pytest.raises(ImportError) as caught:
                package.load()
            messages.append(str(caught.value))
        assert os.environ["ACME_IMPORTS"] == "."
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"acme_sdk can't be imported with torch {torch.__version__} ({reason}")
    assert messages[0].endswith(f"): {INSTALL}")


def test_the_error_of_an_import_is_the_cause(installed: Callable[..., None]) -> None:
    installed("2.2", "raise OSError('no driver')")
    with pytest.raises(ConfigurationError) as caught:
        acme().load()
    assert isinstance(caught.value.__cause__, OSError)


def test_packages_own_refusal_verbatim(installed: Callable[..., None]) -> None:
    """An ImportError that the package raises itself says what to do: nothing is put around it."""
    installed("2.2.0", "raise ImportError('acme_sdk wants ACME_DRIVER=1')")
    with pytest.raises(ConfigurationError, match=r"^acme_sdk wants ACME_DRIVER=1$"):
        acme().load()


def test_an_import_that_ends_the_process_passes_through(installed: Callable[..., None]) -> None:
    installed("2.2", "import sys; sys.exit('driver not loaded')")
    for _ in range(2):
        with pytest.raises(SystemExit, match="driver not loaded"):
            acme().load()


def test_explain_may_be_overridden(installed: Callable[..., None]) -> None:
    class Acme(VendorPackage):
        def explain(self, error: Exception) -> str:
            return "for another torch" if isinstance(error, AssertionError) else super().explain(error)

    installed("2.2", "assert False")
    with pytest.raises(ConfigurationError, match=r"^for another torch$"):
        Acme("acme_sdk", plugin="torchhal-acme", install=INSTALL).load()


def test_errors_of_an_import_that_the_caller_makes() -> None:
    package = acme()
    with pytest.raises(ConfigurationError, match=r"can't be imported with torch .* \(RuntimeError: no device\)"):  # noqa: SIM117
        with package.import_errors():
            raise RuntimeError("no device")


def test_restored_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_LOG", "info")
    monkeypatch.delenv("ACME_RANK", raising=False)
    with pytest.raises(KeyError), restored_environ("ACME_LOG", "ACME_RANK"):
        os.environ.update(ACME_LOG="error", ACME_RANK="1")
        raise KeyError
    assert os.environ["ACME_LOG"] == "info" and "ACME_RANK" not in os.environ


@pytest.mark.cold_start
def test_it_works_without_an_import_of_torch() -> None:
    program = (
        "import sys\n"
        "from torchhal.vendor_package import VendorPackage\n"
        "package = VendorPackage('no_such', plugin='p', install='i', not_installed='{torch}')\n"
        "print(package.problem(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    version, imported = done.stdout.split()
    assert version == torch.__version__ and imported == "False"
