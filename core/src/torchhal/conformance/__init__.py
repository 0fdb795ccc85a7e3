"""The conformance kit: what a plugin has to show, as checks with public ids.

In a plugin's tests::

    from torchhal.conformance import conformance_suite

    TestMine = conformance_suite("accelerator", "mine", features={"memory_stats"})

or from a shell: ``torchhal conformance run accelerator mine --report report.json``.
"""

from torchhal.conformance import checks as _checks  # noqa: F401  registers them
from torchhal.conformance.check import CHECKS, Check, CheckFailed, checks_for
from torchhal.conformance.run import Result, Session
from torchhal.conformance.subject import Subject
from torchhal.conformance.suite import conformance_suite

__all__ = ["CHECKS", "Check", "CheckFailed", "Result", "Session", "Subject", "checks_for", "conformance_suite"]
