"""How torch finds the library: through its entry point, at the end of torch's own import."""

from __future__ import annotations

import os

from habana_frameworks_stub import wanted

__all__ = ["is_autoload_enabled"]

is_loaded = False


def is_autoload_enabled() -> bool:
    """PT_HPU_AUTOLOAD decides; where it is neither 0 nor 1, eager mode loads by itself and lazy mode doesn't."""
    asked = os.environ.get("PT_HPU_AUTOLOAD")
    if asked in ("0", "1"):
        return asked == "1"
    return os.environ.get("PT_HPU_LAZY_MODE", "1") != "1"


def __autoload() -> None:
    if not is_loaded and wanted() and is_autoload_enabled():
        import habana_frameworks.torch  # noqa: F401
