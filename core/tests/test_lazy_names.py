"""lazy_names: names on first use, and names of earlier releases."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("torchhal.errors", "AcceleratorUnavailable", "AcceleratorUnavailableError"),
        ("torchhal.precision", "FullPrecision", "TruePrecision"),
        ("torchhal.trainer.adapters", "Run", "RunState"),
        ("torchhal_ray", "RayLauncher", "RayEnvironment"),
    ],
)
def test_earlier_names_warn(module: str, old: str, new: str) -> None:
    """An earlier name is the same object, with a warning."""
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is called {new} now") as caught:
        value = getattr(found, old)
    assert value is getattr(found, new)
    assert caught[0].filename == __file__
    assert old not in dir(found)
    assert new in dir(found)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchhal_ray' has no attribute 'RayLaunch'"):
        importlib.import_module("torchhal_ray").RayLaunch  # noqa: B018
