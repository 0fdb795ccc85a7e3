"""What ``Trainer(barebones=True)`` switches off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchhal.errors import ConfigurationError

_OFF = (
    "enable_checkpointing", "logger", "enable_progress_bar", "log_every_n_steps", "enable_model_summary",
    "num_sanity_val_steps", "fast_dev_run", "detect_anomaly", "profiler",
)  # fmt: skip


def check_barebones(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an argument that asks for something the mode switches off."""
    for name in _OFF:
        value = arguments[name]
        if value not in (None, False, 0):
            raise ConfigurationError(
                f"`Trainer(barebones=True, {name}={value!r})` was passed: that mode is for the speed of the loop "
                "alone, and switches this off"
            )
