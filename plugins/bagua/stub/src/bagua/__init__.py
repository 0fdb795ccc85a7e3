"""A stub of Bagua: its names and what its algorithms compute, over gloo. See the distribution's README."""

from __future__ import annotations

from bagua_stub import __version__, check

check()

__all__ = ["__version__"]
