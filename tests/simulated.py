"""The tests that run on the simulated accelerator skip beside a torch that it isn't for, and say so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "plugins" / "simulator" / "tests", ROOT / "plugins" / "hpu" / "tests")
DEVICES = {"sim", "hpu", "hpu_single", "hpu_parallel", "plugins/hpu"}
"""Parameters of tests that mean it: Gaudi's stub is its second flavour."""
PAGES = ("test-without-hardware.md", "gaudi.md", "plugins/simulator/README.md", "plugins/hpu/")


def skip_on_another_torch(items: Iterable[pytest.Item]) -> None:
    on_it = [item for item in items if runs_on_it(item)]
    if on_it and (why := unsupported()):
        for item in on_it:
            item.add_marker(pytest.mark.skip(reason=why))


def unsupported() -> str:
    """What the simulator says of this torch, or an empty string; also where it isn't installed, as tests say then."""
    try:
        from torchhal_simulator._build import check_torch
        from torchhal_simulator._build_errors import BuildError
    except ModuleNotFoundError:
        return ""
    try:
        check_torch()
    except BuildError as error:
        return str(error)
    return ""


def runs_on_it(item: pytest.Item) -> bool:
    if item.get_closest_marker("simulator") is not None or any(folder in item.path.parents for folder in FOLDERS):
        return True
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return any(value in DEVICES or value.endswith(PAGES) for value in _texts(parameters.values()))


def _texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str | Path):
            yield str(value)
        elif isinstance(value, tuple | list):
            yield from _texts(value)
