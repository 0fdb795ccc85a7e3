"""Parse the argument ``devices`` for every accelerator, and call functions of torch's device modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from torchhal.errors import ConfigurationError


class Accelerator(Protocol):
    """The members of an accelerator that are needed to count its devices."""

    name: ClassVar[str]
    oversubscribable: ClassVar[bool]

    def device_count(self) -> int: ...
    def auto_device_count(self) -> int: ...
    def require_available(self) -> Any: ...


_TEXT = re.compile(r"\s*-?[0-9]+\s*(?:,\s*-?[0-9]+\s*)*,?\s*")
_FORMS = "'auto', a count such as 2 or '2', -1 for all, or indices such as [0, 1] or '0,1'"


def parse_devices(accelerator: Accelerator, devices: int | str | Sequence[int]) -> tuple[int, ...]:
    """See :meth:`torchhal.accelerators.Accelerator.parse_devices`. Pure: reads only, starts nothing."""
    request: object = devices
    if isinstance(request, str):
        request = _parse_text(accelerator, request)
    if isinstance(request, str):  # "auto"
        return tuple(range(accelerator.auto_device_count()))
    if isinstance(request, bool):
        raise _error(accelerator, devices)
    if isinstance(request, int):
        return _first(accelerator, request, devices)
    if isinstance(request, Sequence) and not isinstance(request, bytes):
        return _indices(accelerator, request, devices)
    raise _error(accelerator, devices)


def _parse_text(accelerator: Accelerator, text: str) -> int | str | list[int]:
    stripped = text.strip()
    if stripped == "auto":
        return stripped
    if not _TEXT.fullmatch(text):  # int() would take '1_0', '+1' and other alphabets' digits
        raise _error(accelerator, text)
    numbers = [int(part) for part in stripped.removesuffix(",").split(",")]
    return numbers if "," in stripped else numbers[0]


def _first(accelerator: Accelerator, count: int, asked: object) -> tuple[int, ...]:
    existing = accelerator.device_count()
    if count < 1 and count != -1:
        raise _error(accelerator, asked)
    if not existing:
        accelerator.require_available()
    if count == -1:
        return tuple(range(existing))
    if count > existing and not accelerator.oversubscribable:
        raise ConfigurationError(
            f"'devices' must be at most {existing} for accelerator {accelerator.name!r} (got {asked!r}): "
            f"this process sees {existing} of them; ask for fewer, or 'auto' for all"
        )
    return tuple(range(count))


def _indices(accelerator: Accelerator, indices: Sequence[object], asked: object) -> tuple[int, ...]:
    chosen: list[int] = []
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise _error(accelerator, asked)
        chosen.append(index)
    if not chosen or len(set(chosen)) != len(chosen):
        raise _error(accelerator, asked)
    existing = accelerator.device_count()
    if not existing:
        accelerator.require_available()
    if max(chosen) >= existing and not accelerator.oversubscribable:
        raise ConfigurationError(
            f"'devices' asks for index {max(chosen)} of accelerator {accelerator.name!r} (got {asked!r}): "
            f"this process sees {existing}" + (f", indices 0 to {existing - 1}" if existing else "")
        )
    return tuple(chosen)


def _error(accelerator: Accelerator, asked: object) -> ConfigurationError:
    return ConfigurationError(
        f"'devices' must be {_FORMS}, each index once (got {asked!r}); "
        f"accelerator {accelerator.name!r} has {accelerator.device_count()} here"
    )


def call_on_device(function: Callable[..., Any], device: torch.device | None, *args: Any) -> Any:
    """Call ``function(*args, device)``, or ``function(*args)`` for a device without an index.

    A device without an index is the current one, and the modules of hardware with one device per process have no such
    argument.
    """
    if device is None or device.index is None:
        return function(*args)
    return function(*args, device)
