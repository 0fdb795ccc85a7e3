"""Profile what a device does: the activities that torch's profiler records, regions, and a vendor's own profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch


class DeviceProfiling:
    """The profiler of a device, with default bodies over ``torch.profiler``.

    Nothing of it is called unless somebody profiles.
    """

    device_type: ClassVar[str]

    def profiler_activities(self) -> set[torch.profiler.ProfilerActivity]:
        """Return what ``torch.profiler.profile(activities=...)`` is to record on this hardware.

        Called on every rank that profiles, after :meth:`setup_device`.

        Returns:
            The CPU's activity and, where this build of torch can record it, the one named after the device type;
            ``PrivateUse1`` for a device that is registered as that.

        Checks: ACC-27.

        .. versionadded:: 0.2
        """
        known = torch.profiler.ProfilerActivity.__members__
        is_private = self.device_type == torch._C._get_privateuse1_backend_name()
        own = known.get("PrivateUse1" if is_private else self.device_type.upper())
        supported: set[torch.profiler.ProfilerActivity] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        return {known["CPU"], *({own} & supported if own is not None else ())}

    def profile(self, **options: Any) -> AbstractContextManager[Any]:
        """Return a context in which the device's work is recorded; ``torch.profiler.profile`` by default.

        Called on every rank that profiles, after :meth:`setup_device`. A vendor with a profiler of its own replaces it,
        or adds to it.

        Args:
            **options: those of ``torch.profiler.profile``: ``schedule``, ``on_trace_ready``, ``record_shapes``, ...;
                ``activities`` defaults to :meth:`profiler_activities`.

        Returns:
            A context manager; what it enters has ``step()``, to be called after each training step.

        Checks: ACC-27.

        .. versionadded:: 0.2
        """
        options.setdefault("activities", self.profiler_activities())
        return torch.profiler.profile(**options)

    def profile_region(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that names the work inside it in the traces of :meth:`profile`.

        Called on any rank and thread, while nothing is profiled too; regions nest, also those of one name. The default
        is ``torch.profiler.record_function``; a vendor enters a region of its own profiler beside it.

        Args:
            name: what a reader of the trace sees, such as ``"forward"``.

        Checks: ACC-27, ACC-57, ACC-58.

        .. versionadded:: 0.2
        """
        return torch.profiler.record_function(name)
