"""Put a single case of a parametrized test into the slow tier."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case for ``pytest.mark.parametrize`` that ``make test`` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)
