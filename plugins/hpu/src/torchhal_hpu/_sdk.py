"""Intel's bridge: loaded once, without what it leaves in the environment, or exactly why it can't be."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import torch
from packaging.version import InvalidVersion, Version

MINIMUM = Version("1.20")
"""The first release with a torch that torchhal runs on. This package is written to the sources of 1.19."""

_lock = threading.RLock()
_loaded = False
_problem = ""


def load() -> None:
    """Import the bridge, which registers the device with torch. Idempotent, also in failing.

    Raises:
        ImportError: it is not installed, too old, made for another torch, or doesn't load.
        RuntimeError: it came too late: torch has been asked for its accelerator before.
    """
    global _loaded, _problem
    with _lock:
        if _loaded:
            return
        if _problem:  # a library that was half imported would say something else the second time
            raise ImportError(_problem)
        try:
            _check_version()
            with _kept("MASTER_ADDR", "MASTER_PORT"):  # its import writes a meeting place that nobody chose
                _import()
        except ImportError as error:
            _problem = str(error)
            raise
        _check_accelerator()
        _loaded = True


def version() -> Version | None:
    """Of the installed bridge; None where its metadata don't say, or it is the stub."""
    try:
        return Version(metadata.version("habana-torch-plugin"))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None


def _check_version() -> None:
    found = version()
    if found is not None and found < MINIMUM:
        raise ImportError(
            f"torchhal-hpu needs release {MINIMUM} or newer of the Gaudi software, and habana-torch-plugin {found} is "
            "installed: upgrade it together with driver and torch, as docs.habana.ai says"
        )


def _import() -> None:
    try:
        import habana_frameworks.torch
        import habana_frameworks.torch.distributed.hccl  # noqa: F401
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("habana_frameworks"):
            raise
        raise ImportError(
            f"the Gaudi software is not installed ({error}): habana-torch-plugin comes with Intel's installer and "
            "containers, as docs.habana.ai says"
        ) from error
    except AssertionError as error:  # its own checks of the torch it finds
        raise ImportError(_about_torch(str(error))) from error
    except AttributeError as error:
        if torch.version.__version__.partition("+")[2]:
            raise
        raise ImportError(_about_torch(f"{type(error).__name__}: {error}")) from error


def _about_torch(said: str) -> str:
    message = f"habana-torch-plugin refuses torch {torch.__version__}: {said}"
    if "Lazy" in said or "local" in said or "startswith" in said:
        return f"{message}. Install the torch that came with it or, for eager mode, set PT_HPU_LAZY_MODE=0"
    return f"{message}. Install the torch that came with it"


def _check_accelerator() -> None:
    """torch answers only once which accelerator it has, and whoever asks before this library is there is told none."""
    import habana_frameworks.torch.hpu as hpu

    if not hpu.is_available():
        return
    answer = torch.accelerator.current_accelerator()
    if answer is None or answer.type != "hpu":
        raise RuntimeError(
            f"torch was asked for its accelerator before the Gaudi software was loaded, and keeps to its answer, "
            f"{answer}: import habana_frameworks.torch, or make the Trainer, before anything that uses "
            "torch.accelerator, in a new process"
        )


@contextmanager
def _kept(*variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    try:
        yield
    finally:
        restore(before)


def restore(variables: dict[str, str | None]) -> None:
    """Set environment variables to what they were; None: they were not there."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_imported() -> bool:
    """Whether somebody has imported the bridge, so that the environment is too late for what it reads then."""
    return "habana_frameworks.torch" in sys.modules
