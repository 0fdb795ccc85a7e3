"""Read the counters of a device, memory in bytes and its sensors, and recognise the errors for too little memory."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import torch

from torchhal.accelerators._devices import call_on_device
from torchhal.errors import message_of

_SENSORS: Final = (
    ("utilization_percent", "utilization", 1.0),
    ("memory_utilization_percent", "memory_usage", 1.0),
    ("temperature_celsius", "temperature", 1.0),
    ("power_watts", "power_draw", 1e-3),  # torch documents milliwatts
    ("clock_mhz", "clock_rate", 1.0),
)
"""(key of ``device_stats``, function of torch's device module, factor to the key's unit)."""


_OUT_OF_MEMORY: Final = re.compile(
    r"out[ _]of[ _](device[ _]|host[ _])?memory|(can't|cannot|failed to) allocate memory|not enough memory",
    re.IGNORECASE,
)
"""Messages of a RuntimeError for too little memory: of torch's allocators, of drivers, and of the system."""


class DeviceStatistics:
    """The counters of a device, with default bodies over ``torch.get_device_module(device_type)``."""

    def _module(self) -> Any:
        raise NotImplementedError

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Return the memory counts of ``device`` in bytes.

        Args:
            device: the device whose memory is counted.

        Returns:
            Ints by the names ``allocated``, ``peak`` and, where known, ``reserved`` and ``limit``; empty where the
            device keeps no such count.

        Checks: ACC-18.
        """
        module, stats = self._module(), {}
        for key, function in (
            ("allocated", "memory_allocated"),
            ("peak", "max_memory_allocated"),
            ("reserved", "memory_reserved"),
        ):
            if (read := getattr(module, function, None)) is not None:
                stats[key] = int(call_on_device(read, device))
        return stats

    def available_memory(self, device: torch.device) -> int | None:
        """Return how many bytes this process can still allocate on ``device``.

        ``strategy="auto"`` chooses by it. Called on a rank whose device is selected. By default what
        ``torch.accelerator.get_memory_info`` says is free and what torch's allocator has cached, or else what
        :meth:`memory_stats` says is left of its ``limit``.

        Args:
            device: of this rank.

        Returns:
            Bytes; None where that is not known.

        Checks: ACC-72.

        .. versionadded:: 0.2
        """
        try:
            stats = self.memory_stats(device)
            allocated = stats.get("allocated", 0)
            current = torch.accelerator.current_accelerator()
            if current is None or current.type != device.type:
                return max(0, stats["limit"] - allocated) if stats.get("limit") else None
            read = getattr(torch.accelerator, "get_memory_info", None) or self._module().mem_get_info  # of older torch
            free, _ = read(device)
        except (RuntimeError, NotImplementedError, AttributeError):
            return None
        return int(free) + max(0, stats.get("reserved", allocated) - allocated)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` says that there was too little memory, of the device or of the host.

        Called with what an operator, a step or a whole run has raised, also after the tear-down; never raises. After
        such an error the device works on: less work may fit. The default recognises ``torch.OutOfMemoryError``,
        ``MemoryError``, and the words of torch's allocators and of drivers in a RuntimeError. A vendor whose library
        reports it otherwise returns ``super().is_out_of_memory(error)`` or its own finding.

        Args:
            error: any exception; those that caused it (``__cause__``) are looked at too.

        Checks: ACC-71.

        .. versionadded:: 0.2
        """
        seen: set[int] = set()
        found: BaseException | None = error
        while found is not None and id(found) not in seen:
            seen.add(id(found))
            if isinstance(found, torch.OutOfMemoryError | MemoryError):
                return True
            if isinstance(found, RuntimeError | OSError) and _OUT_OF_MEMORY.search(message_of(found)):
                return True
            found = found.__cause__
        return False

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Set the peak of :meth:`memory_stats` to the current allocation.

        Args:
            device: the device whose count is reset.

        Checks: ACC-18.
        """
        reset = getattr(self._module(), "reset_peak_memory_stats", None)
        if reset is not None:
            call_on_device(reset, device)

    def device_stats(self, device: torch.device) -> dict[str, float]:
        """Return what the sensors of ``device`` read now, by names that end with their unit.

        Called by ``torchhal doctor`` for each device that a process sees, and by callbacks at any time on any rank. It
        never raises: a reading that can't be made, for want of a driver's library or of the right to use it, is left
        out. The default reads what torch's module for the device offers; a vendor returns ``super().device_stats()``
        with readings of its own, under names of its own or these:

        * ``utilization_percent``: share of the last sample period in which the device computed, 0 to 100.
        * ``memory_utilization_percent``: share of it in which the device's memory was read or written.
        * ``temperature_celsius``: of the device's main sensor.
        * ``power_watts``: average power draw.
        * ``clock_mhz``: clock of the compute units.

        Args:
            device: the device whose sensors are read; without an index the current one.

        Returns:
            Finite floats by name; empty where nothing can be read.

        Checks: ACC-26.

        .. versionadded:: 0.2
        """
        stats: dict[str, float] = {}
        for key, function, factor in _SENSORS:
            try:
                value = float(call_on_device(getattr(self._module(), function), device)) * factor
            except Exception:  # no such function, no driver's library, no permission
                continue
            if math.isfinite(value):
                stats[key] = value
        return stats
