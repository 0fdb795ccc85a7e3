"""Leave out the tests for which a session has no time; ``TESTS_UNTIL`` is when it ends, in seconds since 1970.

On a machine that is half as fast as usual the tests take longer than CI waits for, and a session that is killed says
nothing of those that ran. What is left out counts as skipped, with the reason; ``TESTS_TURN`` lets another part be last
in the next session (:mod:`distribution`).
"""

from __future__ import annotations

import os
import time

import pytest

UNTIL = "TESTS_UNTIL"
_until = ""


def start(config: pytest.Config) -> None:
    """Take the time over from the environment, from which the sessions that tests start would have it, too."""
    global _until
    if not getattr(config.option, "numprocesses", None):  # the workers of xdist inherit it
        _until = os.environ.pop(UNTIL, "")


def skip_if_late() -> None:
    """Skip this test if the session's time is over."""
    if _until and time.time() > float(_until):
        pytest.skip(f"the session had time until {time.strftime('%H:%M:%S', time.localtime(float(_until)))}")
