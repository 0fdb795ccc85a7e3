"""Let a component report on its own installation: the base class of every contract."""

from __future__ import annotations


class Diagnosable:
    """A component that reports on its installation to ``torchhal doctor``.

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
