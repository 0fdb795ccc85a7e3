"""Record the autocast that is on, and enter it elsewhere: in another thread, or where a layer is computed again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


class RecordedAutocast:
    """The autocast of this thread when the object is made.

    Args:
        device_types: whose autocast is recorded, beside that of the host.
    """

    def __init__(self, device_types: Iterable[str]) -> None:
        self._states = [
            (name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name))
            for name in sorted({"cpu", *device_types})
        ]
        self._keeps_casts = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which that autocast is on, or off if it was."""
        with ExitStack() as stack:
            for device_type, dtype, enabled in self._states:
                keeps = self._keeps_casts
                stack.enter_context(torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=keeps))
            yield
