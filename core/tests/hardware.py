"""The accelerator that a test runs on: a word in the environment, so that the test's ranks and scripts know it too.

A test of a module marked ``usefixtures("accelerator")`` runs once for each of :data:`ACCELERATORS`. It asks here for
the name, the accelerator or the device, and nothing else chooses: while it runs on another one, no strategy of its
processes may set up the CPU (:func:`claim`).
"""

from __future__ import annotations

import importlib.util
import os

VARIABLE = "CORE_TESTS_ACCELERATOR"
ACCELERATORS = ("cpu", "sim")
_PACKAGES = {"sim": "torchhal_simulator"}


def name() -> str:
    return os.environ.get(VARIABLE, "cpu")


def missing(accelerator: str) -> str:
    """Why nothing can be tested on it; empty if it can. One that is installed and broken is not missing: it fails."""
    package = _PACKAGES.get(accelerator)
    if package is None or importlib.util.find_spec(package) is not None:
        return ""
    return f"{package} is not installed: pip install ./plugins/simulator"


def accelerator():
    """The accelerator of this test; torch knows its devices from now on."""
    from torchhal.accelerators import CPUAccelerator

    if name() == "cpu":
        return CPUAccelerator()
    from torchhal_simulator.accelerator import SimAccelerator

    claim()
    SimAccelerator.require_available()
    return SimAccelerator()


def device():
    """This process's ``torch.device``, also for the plain loop that a test compares with."""
    return accelerator().get_parallel_devices([int(os.environ.get("LOCAL_RANK", "0"))])[0]


def to_device(batch):
    """The batch where the strategies of this test have it."""
    from torchhal.pytree import move_to_device

    return move_to_device(batch, device())


def waits() -> int:
    """How often this process has waited for its device; 0 where nobody counts."""
    if name() == "cpu":
        return 0
    from torchhal_simulator._counters import counters

    return counters().synchronizations


_claimed = False


def claim() -> None:
    """Let this process's strategies set up no CPU while its test runs on something else."""
    from torchhal.accelerators import CPUAccelerator

    global _claimed
    if _claimed:
        return
    _claimed = True
    setup_device = CPUAccelerator.setup_device

    def guarded(self, device):
        assert name() == "cpu", f"a strategy set up {device} in a test that runs on {name()!r}"
        setup_device(self, device)

    CPUAccelerator.setup_device = guarded
