"""Let each component report on its installation, and refuse this machine or the others before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchhal.plugin import Availability

if TYPE_CHECKING:
    import torch

__all__ = ["PARTS", "Composable", "Composition"]

PARTS: Final = ("accelerator", "precision", "checkpoint_io", "cluster_environment", "strategy")
"""The kinds of components of a :class:`Composition`."""


@dataclass(frozen=True)
class Composition:
    """The components of a run and the processes that are asked for, before any of them is started.

    .. versionadded:: 0.2
    """

    accelerator: Any
    """The :class:`~torchhal.accelerators.Accelerator`."""
    precision: Any
    """The :class:`~torchhal.precision.Precision`."""
    checkpoint_io: Any
    """The :class:`~torchhal.checkpoint.CheckpointIO`."""
    cluster_environment: Any
    """The :class:`~torchhal.cluster.ClusterEnvironment`; None for a strategy of one process without one."""
    strategy: Any
    """The :class:`~torchhal.strategies.Strategy`, which is not configured yet."""
    devices: Sequence[torch.device]
    """The devices of each node."""
    num_nodes: int | None
    """Number of nodes; None where it is known only when the ranks have met."""
    world_size: int
    """Number of processes of the job, as far as it is known."""


def takes_parts_too(check_fit: Callable[[Any, Composition], None]) -> Callable[[Any, Composition], None]:
    """Let ``super().check_fit(precision=..., world_size=...)`` in a class of an earlier release do nothing."""

    @functools.wraps(check_fit)
    def check(self: Any, composition: Composition | None = None, **parts: Any) -> None:
        if composition is not None:
            check_fit(self, composition)
        elif set(parts) != {"precision", "world_size"}:
            raise TypeError(f"check_fit() takes the composition (got {', '.join(parts) or 'nothing'})")

    return check


class Composable:
    """A component that can refuse, to be used on this machine or together with the others, and reports to ``doctor``.

    .. versionadded:: 0.2
    """

    @classmethod
    def availability(cls) -> Availability:
        """Return whether this class can be used in this process and, if not, why.

        Called where the class is asked for, before anything starts, for what ``Component.requires`` can't say: the
        version of a vendor's library, a missing driver. It never raises, starts no device and no process, and may be
        called any number of times. :meth:`.VendorPackage.availability` answers for a package, without an import.

        Returns:
            An :class:`~torchhal.plugin.Availability`; its ``reason`` is not empty where it is false. By default it is
            available.

        Checks: GEN-05, GEN-31.

        .. versionadded:: 0.2
        """
        return Availability(True)

    def check_fit(self, composition: Composition) -> None:
        """Raise an error if this component can't work in ``composition``.

        Called once by ``resolve``, in the process that makes the Trainer, before anything is started and with all
        components chosen: what is refused here is refused in one place and at once, and not by each rank after the
        launch. Changes nothing and starts nothing. By default everything fits.

        Args:
            composition: the components, this one among them, and the processes.

        Raises:
            ConfigurationError: it can't; the message names both sides, and what to do.

        Checks: GEN-32.

        .. versionadded:: 0.2
        """

    @classmethod
    def diagnostics(cls) -> list[str]:
        """Return what a user with a problem should know of this component's installation, one sentence each.

        For ``torchhal doctor``, which prints each on a line of its own: the version of a driver or a library, an
        environment variable that slows the device down, a missing optional kernel, with what to do about it. Called in
        any process, for a class whose required modules are installed, whether or not the hardware is there. It starts
        no device and no process, changes nothing, and returns within a second. An error in it costs the lines of this
        component alone. Advice that a job of a cluster environment needs before it starts belongs into
        :meth:`.ClusterEnvironment.recommendations`, which is logged too.

        Returns:
            Sentences without a line break; empty by default, and where all is well.

        Checks: GEN-30.

        .. versionadded:: 0.2
        """
        return []
