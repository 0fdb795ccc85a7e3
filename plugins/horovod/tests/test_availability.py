"""What is said where Horovod is missing, of another version, or has what a Trainer can't do."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from torchhal.errors import ConfigurationError
from torchhal_horovod import HorovodEnvironment, HorovodStrategy


@pytest.fixture
def version(monkeypatch):
    """Sets the version of Horovod that is found: None for none."""
    real = metadata.version

    def found(name):
        if name != "horovod":
            return real(name)
        if found.version is None:
            raise metadata.PackageNotFoundError(name)
        return found.version

    monkeypatch.setattr(metadata, "version", found)
    return lambda number: setattr(found, "version", number)


def test_missing(version):
    version(None)
    answer = HorovodStrategy.availability()
    assert not answer and "strategy 'horovod' needs the package horovod, which is not installed" in answer.reason
    with pytest.raises(ConfigurationError, match="the README of torchhal-horovod"):
        HorovodStrategy()


def test_another_version(version):
    version("0.27.0")
    with pytest.raises(ConfigurationError, match=r"works with horovod .* \(found horovod 0.27.0\)"):
        HorovodStrategy()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"compression": "int8"}, "must be None or 'fp16'"), ({"find_unused_parameters": 1}, "must be a bool")],
)
def test_arguments(version, options, said):
    version("0.28.1")
    with pytest.raises(ConfigurationError, match=said):
        HorovodStrategy(**options)


VARIABLES = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
}  # fmt: skip


def test_elastic_jobs_are_refused(monkeypatch):
    for name, value in {**VARIABLES, "HOROVOD_ELASTIC": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="start a fixed number with 'horovodrun -np'"):
        HorovodEnvironment().validate_settings(num_devices=2, num_nodes=1)


def test_a_job_of_one_process_and_one_of_mpi_are_others(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert HorovodEnvironment.detect()
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    assert not HorovodEnvironment.detect()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR")  # horovodrun --mpi
    assert not HorovodEnvironment.detect()


@pytest.mark.usefixtures("horovod")
def test_the_extra_holds_what_horovod_asks_for():
    """And not Horovod itself, whose build by pip fails on torch's headers."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^vendor = \[(.*)\]$", project, re.MULTILINE)
    asked = {re.split(r"[^\w-]", one)[0].lower() for one in metadata.requires("horovod") if "extra ==" not in one}
    assert {re.split(r"[^\w-]", one)[0] for one in re.findall(r'"(.*?)"', extra)} == asked - {"dataclasses"}
