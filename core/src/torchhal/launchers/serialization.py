"""Send a function from a supervisor to its workers and its result back.

Files without a name: nothing is left over, however a process ends. Written with torch.save, so tensors arrive as
copies (``multiprocessing``'s own pickling would share the CPU tensors' memory) and shared storages stay shared.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from typing import IO, Any

from torchhal.errors import LaunchError

__all__ = [
    "apply_settings",
    "collect_settings",
    "pack_function",
    "read",
    "write",
]


class AnonymousFile:
    """A temporary file without a name; pickles to a started process, with any start method."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            self._file: IO[bytes] | None = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
            descriptor = self._file.fileno()
        else:
            self._file = os.fdopen(descriptor, "r+b")
        self.descriptor = descriptor

    def write(self, value: Any, pickle_module: Any = pickle) -> None:
        assert self._file is not None
        write(value, self._file, pickle_module)
        self._file.flush()

    def read(self, **options: Any) -> Any:
        """Return what :meth:`write` wrote, in any process."""
        return read(io.BufferedReader(_Positioned(self.descriptor)), **options)

    def content(self) -> bytes:
        """Return the bytes of the file, for workers on other machines."""
        return _Positioned(self.descriptor).readall()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __reduce__(self) -> Any:
        # Legal only while a process is being started, like everything that hands over a descriptor.
        return _rebuild, (reduction.DupFd(self.descriptor),)


def write(value: Any, file: IO[bytes], pickle_module: Any = pickle) -> None:
    """Write ``value`` into an open file, as :func:`read` reads it."""
    from torch import serialization  # see torchhal.checkpoint.torch_file

    serialization.save(value, file, pickle_module=pickle_module)


def read(file: IO[bytes], **options: Any) -> Any:
    """Return what :func:`write` wrote, in any process of the same job, which is trusted."""
    from torch import serialization

    return serialization.load(file, weights_only=False, **options)


def _rebuild(handle: Any) -> AnonymousFile:
    return AnonymousFile(handle.detach())


class _Positioned(io.RawIOBase):
    """A reader of a descriptor with its own position: duplicates in several processes share the kernel's."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self._descriptor).st_size}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = os.pread(self._descriptor, len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


class _First:
    """An object that is unpickled as the result of ``prepare()``: what follows in the file is read after that call."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self.prepare = prepare

    def __reduce__(self) -> Any:
        return self.prepare, ()


def pack_function(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    prepare: Callable[[], None] | None = None,
    *,
    instead: str,
    pickle_module: Any = pickle,
) -> AnonymousFile:
    """Return ``(None, function, args, kwargs)`` as a file for the workers.

    LaunchError names what can't be sent, and ``instead`` the alternative for the user.

    The reader calls ``prepare`` before the rest is unpickled.
    """
    file = AnonymousFile()
    try:
        file.write((None if prepare is None else _First(prepare), function, args, kwargs), pickle_module)
    except OSError as error:
        file.close()
        raise LaunchError(
            f"the function and its arguments could not be written to a temporary file: {error}"
        ) from error
    except Exception as error:  # pickle raises PicklingError, AttributeError, TypeError, RecursionError, ...
        file.close()
        parts = [("the function", function)]
        parts += [(f"argument {index}", value) for index, value in enumerate(args)]
        parts += [(f"argument {name!r}", value) for name, value in kwargs.items()]
        found = (_culprit(name, value, pickle_module.dumps) for name, value in parts)
        where = next(filter(None, found), "the function")
        raise LaunchError(
            f"{where} can't be sent to another process ({type(error).__name__}: {error}). Define the class or function "
            f"at the top level of a module, and open files, locks and connections later; {instead}"
        ) from error
    return file


def _culprit(name: str, value: Any, dumps: Callable[[Any], bytes], depth: int = 3) -> str | None:
    """Return the innermost part of ``value`` that doesn't pickle, as a path; None when it does."""
    try:
        dumps(value)
        return None
    except Exception:
        pass
    parts: list[tuple[str, Any]] = []
    if depth:
        if isinstance(value, dict):
            parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
        elif isinstance(value, (list, tuple)):
            parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
        else:
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, type(sys)):
                parts.append((f"{name}'s object", owner))
            parts += [(f"{name}.{key}", part) for key, part in getattr(value, "__dict__", {}).items()]
    for part_name, part in parts:
        if (found := _culprit(part_name, part, dumps, depth - 1)) is not None:
            return found
    return f"{name} (of type {type(value).__qualname__})"


def collect_settings() -> dict[str, Any]:
    """Return the parent's global state that a fresh interpreter lacks: random states, and how torch computes."""
    import torch

    settings: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes() if "numpy" in sys.modules else torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    }
    if "numpy" in sys.modules:
        settings["numpy"] = sys.modules["numpy"].random.get_state()
    return settings


def apply_settings(settings: dict[str, Any]) -> None:
    """Put :func:`collect_settings` in force in this process."""
    import torch

    random.setstate(settings["python"])
    torch.set_rng_state(torch.tensor(list(settings["torch"]), dtype=torch.uint8))
    torch.set_default_dtype(settings["dtype"])
    enabled, warn_only = settings["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.set_num_threads(settings["threads"])
    anomaly, check_nan = settings["anomaly"]
    if anomaly:
        torch.autograd.set_detect_anomaly(True, check_nan=check_nan)
    if "numpy" in settings:
        import numpy

        numpy.random.set_state(settings["numpy"])
