"""Read how much host memory a process can still have, within the limits of its cgroups."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that this process can still have; None where the system doesn't say.

    Args:
        proc: where Linux describes processes and memory.
        cgroups: where it describes cgroups, of version 2, or of version 1 in ``memory``.
    """
    available = _field(proc / "meminfo", "MemAvailable:")
    if available is None:
        return None
    found = [available]
    for folder in _folders(proc, cgroups):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < 1 << 60:  # version 1 has a huge number for no limit
            cached = _field(folder / "memory.stat", "inactive_file", unit=1) or 0
            found.append(max(0, limit - used + cached))
    return min(found)


def _folders(proc: Path, cgroups: Path) -> list[Path]:
    """Return the folders of this process's cgroup and of those around it, as far as they are seen from here."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = cgroups if not controllers else cgroups / "memory"
        folder = root / path.lstrip("/")
        folders += [each for each in (folder, *folder.parents) if each == root or root in each.parents]
    return folders


def _field(path: Path, name: str, unit: int = 1024) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1]) * unit
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None
