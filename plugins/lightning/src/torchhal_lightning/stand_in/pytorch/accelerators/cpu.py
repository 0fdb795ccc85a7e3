"""What a host's processor and memory are doing."""

from __future__ import annotations


def get_cpu_stats() -> dict[str, float]:
    """Return what psutil says of the host's processor and memory, in percent."""
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
