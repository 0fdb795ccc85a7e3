"""Search the largest batch size that fits: double it, then halve the interval in which the largest one lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchhal.errors import ConfigurationError

MODES = ("power", "binary")


def search_batch_size(
    fits: Callable[[int], bool],
    *,
    start: int = 2,
    mode: str = "power",
    max_trials: int = 25,
    max_size: int | None = None,
    limit: Callable[[], int | None] = lambda: None,
    margin: float = 0.0,
) -> int:
    """Return the largest batch size that fits, by trials.

    The size is doubled until one doesn't fit; where ``start`` doesn't, it is halved until one does.

    Args:
        fits: tries a size; False where memory runs out.
        start: the first size.
        mode: ``"power"`` returns the last size that fitted; ``"binary"`` goes on between it and the one that didn't.
        max_trials: the most calls of ``fits``; the largest size that fitted by then is returned.
        max_size: the largest size to try; None: no limit.
        limit: called after each trial that fitted; returns the largest size that makes a difference, such as the number
            of samples, or None where it isn't known.
        margin: share by which ``"binary"`` reduces a size beyond which memory ran out, 0 to below 1.

    Raises:
        ConfigurationError: an argument outside its domain, or no size that was tried fits.

    .. versionadded:: 0.2
    """
    largest, failed = bisect(
        fits, start=start, mode=mode, max_trials=max_trials, max_size=max_size, limit=limit, margin=margin
    )
    if not largest:
        raise nothing_fits(failed)
    return largest


def bisect(
    fits: Callable[[int], bool],
    *,
    start: int,
    mode: str,
    max_trials: int,
    max_size: int | None,
    limit: Callable[[], int | None],
    margin: float,
) -> tuple[int, int]:
    """Return what :func:`search_batch_size` does, 0 where nothing fits, and the last size that didn't fit, or 0."""
    check_arguments(start=start, max_trials=max_trials, max_size=max_size, mode=mode, margin=margin)
    largest, failed, size = 0, 0, start
    most = max_size
    for _ in range(max_trials):
        size = size if most is None else min(size, most)
        if fits(size):
            largest = size
            found = limit()
            most = found if most is None else most if found is None else min(most, found)
        else:
            failed = size
        if most is not None and largest >= most:
            largest = most
            break
        if not failed:
            size = largest * 2
        elif failed - largest <= 1 or (largest and mode == "power"):
            break
        else:
            size = (largest + failed) // 2
    if failed and mode == "binary" and largest:
        largest = max(1, int(largest * (1 - margin)))
    return largest, failed


def nothing_fits(failed: int) -> ConfigurationError:
    """Return the error for a search in which nothing fitted, ``failed`` neither."""
    return ConfigurationError(
        f"not even the smallest batch size that was tried, {failed}, fits into memory: use a smaller model, another "
        "precision such as 'bf16-true', or a strategy that divides the model"
    )


def check_arguments(*, mode: str, margin: float, **counts: int | None) -> None:
    """Raise ConfigurationError for an argument of a search outside its domain; ``counts`` are at least 1."""
    if mode not in MODES:
        raise ConfigurationError(f"'mode' must be 'power' or 'binary' (got {mode!r})")
    for name, count in counts.items():
        if name == "max_size" and count is None:
            continue
        if not _is_count(count):
            raise ConfigurationError(f"'{name}' must be an int of at least 1 (got {count!r})")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise ConfigurationError(f"'margin' must be from 0 to below 1 (got {margin!r})")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
