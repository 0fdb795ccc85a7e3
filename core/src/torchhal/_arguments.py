"""Check types and ranges of what users pass to the Trainer, its callbacks and a Module's methods."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from datetime import timedelta
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from torchhal.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"'{name}' must be a bool (got {value!r})")
    return value


def check_optional_bool(name: str, value: Any) -> bool | None:
    return None if value is None else check_bool(name, value)


def check_bool_or_default(name: str, value: Any, default: bool) -> bool:
    """Return ``value``, a bool, or ``default`` for None."""
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"'{name}' must be a bool, or None for {default} (got {value!r})")
    return default if value is None else value


def check_count(name: str, value: Any, *, minimum: int, unlimited: bool = False) -> int:
    """Return ``value``, an int of at least ``minimum``, or -1 where that means without limit; ``True`` is no count."""
    allowed = f"an int of at least {minimum}" + (", or -1 for no limit" if unlimited else "")
    if not _is_int(value) or (value < minimum and not (unlimited and value == -1)):
        raise ConfigurationError(f"'{name}' must be {allowed} (got {value!r})")
    return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's integers are Integral too


def check_optional_count(name: str, value: Any, *, minimum: int, unlimited: bool = False) -> int | None:
    return None if value is None else check_count(name, value, minimum=minimum, unlimited=unlimited)


def check_limit(name: str, value: Any, *, optional: bool = True) -> int | float:
    """Return ``value``, a number of batches (int) or a share of them (float, 0.0 to 1.0); None for all.

    None is valid only where the argument is ``optional``.
    """
    if value is None and optional:
        return 1.0
    if _is_int(value) and value >= 0:
        return int(value)
    if isinstance(value, float) and 0.0 <= value <= 1.0:
        return value
    raise ConfigurationError(
        f"'{name}' must be a number of batches (int of at least 0) or a share of them (float from 0.0 to 1.0) "
        f"(got {value!r})"
    )


def check_interval(name: str, value: Any) -> int | float | timedelta:
    """Return a number of batches (int of at least 1), a share of an epoch (float in (0, 1]), or a timedelta."""
    if value is None:
        return 1.0
    if _is_int(value) and value >= 1:
        return int(value)
    if isinstance(value, float) and 0.0 < value <= 1.0:
        return value
    if isinstance(value, timedelta | Mapping) or (isinstance(value, str) and ":" in value):
        duration = check_duration(name, value)
        assert duration is not None
        return duration
    raise ConfigurationError(
        f"'{name}' must be a number of batches (int of at least 1), a share of an epoch (float above 0.0, at most "
        f"1.0), or a time (timedelta, its keywords as a dict, or 'DD:HH:MM:SS') (got {value!r})"
    )


def check_validation(interval: int | float | timedelta, every_n_epoch: int | None) -> None:
    """Raise an error unless ``val_check_interval`` counts batches where no epoch defines when to validate."""
    if every_n_epoch is None and isinstance(interval, float):
        raise ConfigurationError(
            "'val_check_interval' must be a number of batches (int), or a time, when check_val_every_n_epoch=None "
            f"(got {interval!r})"
        )


def check_clip_val(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"'{name}' must be a positive number, or None or 0 for no clipping (got {value!r})")
    return float(value) or None


def check_positive(name: str, value: Any) -> float:
    """Return a number above 0, which may be infinite."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ConfigurationError(f"'{name}' must be a positive number (got {value!r})")
    return float(value)


def check_clip_algorithm(name: str, value: Any) -> str:
    if value is None:
        return "norm"
    if value not in ("norm", "value"):
        raise ConfigurationError(f"'{name}' must be 'norm' or 'value' (got {value!r})")
    return str(value)


def check_duration(name: str, value: Any) -> timedelta | None:
    """Return a timedelta for a timedelta, its keywords as a dict, or "DD:HH:MM:SS"."""
    if value is None:
        return None
    result: timedelta | None = None
    if isinstance(value, timedelta):
        result = value
    elif isinstance(value, Mapping):
        try:
            result = timedelta(**value)
        except (TypeError, ValueError, OverflowError):
            result = None
    elif isinstance(value, str):
        parts = value.split(":")
        if len(parts) == 4 and all(part.strip().isdigit() for part in parts):
            days, hours, minutes, seconds = map(int, parts)
            result = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if result is None or result <= timedelta(0):
        raise ConfigurationError(
            f"'{name}' must be a positive timedelta, its keywords as a dict, or 'DD:HH:MM:SS' (got {value!r})"
        )
    return result


def check_fast_dev_run(value: Any) -> int:
    """Return the number of batches of a trial run; 0 for a real one."""
    if isinstance(value, bool):
        return int(value)
    return check_count("fast_dev_run", value, minimum=0)


def check_deterministic(value: Any) -> bool | str:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value == "warn"):
        return value or False
    raise ConfigurationError(f"'deterministic' must be True, 'warn', or False or None for neither (got {value!r})")


def check_batch_size(value: Any) -> bool:
    """Return whether the batch size is to be found."""
    if value is None or value == "auto":
        return value is not None
    raise ConfigurationError(
        f"'batch_size' must be 'auto', for the largest that fits, or None, for that of the loader (got {value!r}): a "
        "number of your own belongs into the DataLoader"
    )


def check_folder(name: str, value: Any) -> str:
    """Return a local path or an fsspec URL as str; the working directory for None."""
    path = os.getcwd() if value is None else os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"'{name}' must be a path or None (got {value!r})")
    return path


def check_path(name: str, value: Any) -> str:
    """Return a path or an fsspec URL as str."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"'{name}' must be a path (got {value!r})")
    return path


def check_storage_options(value: Any) -> dict[str, Any] | None:
    """Return keyword arguments of a file system."""
    if value is None or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        return None if value is None else dict(value)
    raise ConfigurationError(f"'storage_options' must be a dict of the file system's options, or None (got {value!r})")


def check_ckpt_path(value: Any) -> str | None:
    """Return a path, an fsspec URL, "last" or "best" as str."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if path is None or (isinstance(path, str) and path):
        return path
    raise ConfigurationError(f"'ckpt_path' must be a path, 'last', 'best' or None (got {value!r})")


def check_order(lower_name: str, lower: int | None, upper_name: str, upper: int | None) -> None:
    """Raise an error where ``lower`` exceeds ``upper``; None and -1 mean no limit."""
    if lower is not None and upper is not None and upper != -1 and lower > upper:
        raise ConfigurationError(f"'{lower_name}' must be at most '{upper_name}' (got {lower} and {upper})")


def check_device(name: str, value: Any) -> torch.device | None:
    """Return a device given as torch's, a string or an index; None stays None."""
    import torch

    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, torch.device | str | int):
            raise TypeError
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise ConfigurationError(
            f"'{name}' must be a torch.device, a string such as 'cpu', an index, or None (got {value!r})"
        ) from None
