"""Configure the simulated devices, and what goes wrong on them: environment variables, or :func:`simulate`.

The README has the table of them. A process of the HPU flavour has the device of its LOCAL_RANK. A step is one of
``Optimizer.step``; an optimizer that steps another one inside its own counts once.

Collectives are those of the simulated backend, sends and barriers included. A slow one has its result late, on the
rank where it is slow, or times out there with its group's timeout. One that fails raises DistBackendError where it
is waited for; one that hangs never returns from there, whatever the timeout, until its group is aborted, which is
longer than hardware with a watchdog hangs. In both cases the rank takes no part, so the others wait for it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

from torchhal_simulator import _distributed as distributed
from torchhal_simulator._device_types import Flavour, loaded
from torchhal_simulator._distributed import CollectiveFault

PREFIX: Final = "TORCHHAL_SIM_"
MAX_DEVICES: Final = 64  # kMaxDevices of csrc/flavour.h
_UNITS: Final = {"kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Loss:
    """The loss of a device, from an optimizer step on or (0) at once."""

    device: int
    step: int = 0


@dataclass(frozen=True)
class Settings:
    """One simulated machine; the field names are the environment variables' without the prefix."""

    devices: int = 2
    memory: int = 16 * 2**30
    poison: bool = False
    lost: Loss | None = None
    collective: CollectiveFault | None = None


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings that the environment variables name; unset or empty ones have their default.

    Raises:
        ValueError: a value, or a variable with the prefix, that means nothing.
    """
    known = {PREFIX + field.name.upper(): field.name for field in fields(Settings)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == PREFIX + "CACHE" or not text.strip():
            continue
        if variable not in known:
            raise ValueError(f"{variable} is no setting of the simulator; there are {', '.join(known)}")
        name = known[variable]
        values[name] = _PARSERS[name](variable, text.strip())
    settings = Settings(**values)
    if settings.lost is not None and settings.lost.device >= settings.devices:
        raise ValueError(
            f"{PREFIX}LOST names device {settings.lost.device}, but {PREFIX}DEVICES gives this machine "
            f"{settings.devices} device(s), counted from 0"
        )
    return settings


def _integer(variable: str, text: str, low: int, high: int) -> int:
    if not re.fullmatch(r"\d+", text) or not low <= int(text) <= high:
        raise ValueError(f"{variable} must be a whole number from {low} to {high} (got {text!r})")
    return int(text)


def _devices(variable: str, text: str) -> int:
    return _integer(variable, text, 0, MAX_DEVICES)


def _memory(variable: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)\s*([kmg]ib)", text.lower())
    nbytes = -1 if match is None else int(match[1]) if match[1] else int(float(match[2]) * _UNITS[match[3]])
    if not 0 <= nbytes < 2**63:
        raise ValueError(f"{variable} must be a number of bytes, or like '64MiB' (got {text!r})")
    return nbytes


def _poison(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1 (got {text!r})")
    return text == "1"


def _lost(variable: str, text: str) -> Loss:
    match = re.fullmatch(r"(\d+)(?:@([1-9]\d*))?", text)
    if match is None or int(match[1]) >= MAX_DEVICES:
        raise ValueError(f"{variable} must be like '1' or '1@3': a device, and the step from 1 on (got {text!r})")
    return Loss(int(match[1]), int(match[2] or 0))


def _collective(variable: str, text: str) -> CollectiveFault:
    match = re.fullmatch(r"(?:(slow)(?:=(\d+(?:\.\d+)?))?|(fail|hang))(?:@([1-9]\d*))?(?:/(\d+))?", text)
    if match is None:
        raise ValueError(
            f"{variable} must be like 'hang@7', 'fail@7/1' or 'slow=0.5': what happens, at which call from 1 on, on "
            f"which rank (got {text!r})"
        )
    slow, seconds, other, call, rank = match.groups()
    return CollectiveFault(
        slow or other, int(call or 0), None if rank is None else int(rank), float(seconds) if seconds else 1.0
    )


_PARSERS: Final = {
    "devices": _devices,
    "memory": _memory,
    "poison": _poison,
    "lost": _lost,
    "collective": _collective,
}

_current: Settings | None = None
_in_force: dict[str, Settings] = {}  # by flavour
_steps = 0
_step_hook: Any = None
_watched: Loss | None = None


def current() -> Settings:
    """Return the settings in force."""
    return _current if _current is not None else from_environment()


def apply(flavour: Flavour) -> None:
    """Put the environment's settings in force on a loaded flavour.

    What is in force already stays as it is: a lost device lost, and the counts of steps and collectives where they
    are, unless their own setting is another one.
    """
    global _current
    settings = _current = from_environment()
    before = _in_force.get(flavour.device_type)
    ops = flavour.ops
    if before is None or settings.devices != before.devices:
        ops.set_device_count(settings.devices if flavour.indexed else min(settings.devices, 1))
    if before is None or settings.memory != before.memory:
        for device in range(MAX_DEVICES):
            ops.set_memory_limit(device, settings.memory)
    if before is None or settings.lost != before.lost:
        for device in range(MAX_DEVICES):
            ops.set_lost(device, False)
        if settings.lost is not None and not settings.lost.step:
            _lose(flavour, settings.lost.device)
    if before is None or settings.poison != before.poison:
        ops.set_poison(settings.poison)
    _watch_steps(settings.lost)
    if before is None or settings.collective != before.collective:
        distributed.set_fault(flavour, settings.collective)
    _in_force[flavour.device_type] = settings


def _lose(flavour: Flavour, device: int) -> None:
    """Lose ``device`` of this machine, if this process has it."""
    if flavour.indexed:
        flavour.ops.set_lost(device, True)
    elif device == int(os.environ.get("LOCAL_RANK") or 0):
        flavour.ops.set_lost(0, True)


def _watch_steps(loss: Loss | None) -> None:
    """Count optimizer steps, only where a device is to be lost at one."""
    global _steps, _step_hook, _watched
    if loss == _watched:
        return
    if _step_hook is not None:
        _step_hook.remove()
        _step_hook = None
    _watched, _steps = loss, 0
    if loss is None or not loss.step:
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def count(*_: object) -> None:
        # An optimizer that steps another one, as ZeroRedundancyOptimizer does, takes one step: torch's wrapper, which
        # calls this, is on the stack twice. A count of those begun and ended would be off after one that failed.
        global _steps
        caller = sys._getframe(1)
        outer = caller.f_back
        while outer is not None:
            if outer.f_code is caller.f_code:
                return
            outer = outer.f_back
        _steps += 1
        if _steps >= loss.step:
            for flavour in loaded():
                _lose(flavour, loss.device)

    _step_hook = register_optimizer_step_pre_hook(count)


@contextmanager
def simulate(**settings: Any) -> Iterator[None]:
    """Put other settings in force inside, here and in processes that are started inside.

    Keywords are those of :class:`Settings`, values as the environment variables take them::

        with simulate(devices=4, memory="64MiB", lost="1@3", collective="hang@7/1"):
            trainer.fit(model)

    What isn't named stays as it is, also inside another ``simulate``: devices that are lost, and the counts of steps
    and collectives. These begin anew where their own setting changes, at the beginning and at the end.

    Raises:
        TypeError: no such setting.
        ValueError: a value that means nothing.
    """
    variables = {}
    for name, value in settings.items():
        if name not in _PARSERS:
            raise TypeError(f"'{name}' is no setting of the simulator; there are {', '.join(_PARSERS)}")
        variables[PREFIX + name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
    before = {variable: os.environ.get(variable) for variable in variables}
    from_environment({**os.environ, **variables})  # all are sound, or nothing changes
    os.environ.update(variables)
    try:
        for flavour in loaded():
            apply(flavour)
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        for flavour in loaded():
            apply(flavour)
