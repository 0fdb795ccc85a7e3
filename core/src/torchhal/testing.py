"""Provide tests with a registry that nothing installed on the machine can reach.

As a context manager::

    with isolated_registry() as registry:
        registry.register("strategy", "mine", MyStrategy)
        Trainer(strategy="mine")

As a fixture of the same name, with ``pytest_plugins = ["torchhal.testing"]`` in the root ``conftest.py``::

    def test_mine(isolated_registry):
        isolated_registry.register("strategy", "mine", MyStrategy)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchhal import registry
from torchhal.registry import Registry

if TYPE_CHECKING:
    from importlib_metadata import Distribution

__all__ = ["isolated_registry"]


@contextmanager
def isolated_registry(
    *, distributions: Iterable[Distribution] = (), environ: Mapping[str, str] | None = None
) -> Iterator[Registry]:
    """Put a fresh registry in the place of the process's own, and the old one back at the end.

    It has core's parts, the plugins of ``distributions`` (none unless given; for instance
    ``importlib_metadata.distributions(path=[folder])``) and what is registered inside the block. TORCHHAL_*
    variables are taken from ``environ``, which is empty unless given.
    """
    given = tuple(distributions)
    before = registry._default
    registry._default = Registry(distributions=lambda: given, environ={} if environ is None else environ)
    try:
        yield registry._default
    finally:
        registry._default = before


try:
    import pytest
except ImportError:  # the context manager works without it
    pass
else:

    @pytest.fixture(name="isolated_registry")
    def _isolated_registry() -> Iterator[Registry]:
        """Yield a fresh registry with core's components and nothing else, in place for one test."""
        with isolated_registry() as fresh:
            yield fresh
