"""Set torch's global switches for a run, and restore them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchhal.trainer.run_state import RunState


def save_torch_flags() -> Callable[[], None]:
    """Return a function that restores torch's global switches to their present values."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly, check_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def restore() -> None:
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (deterministic, warn_only):  # the call imports torch's compiler, which a signal may have cut short
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.autograd.set_detect_anomaly(anomaly, check_nan)

    return restore


def set_torch_flags(run: RunState) -> None:
    """Set torch's global switches to the run's settings."""
    if run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=run.deterministic == "warn")
    if run.benchmark is not None:
        run.strategy.accelerator.set_benchmark(run.benchmark)
    if run.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
