"""Choose the accelerator: the one that was named, or the best that can be used here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torchhal import registry
from torchhal.accelerators import Accelerator
from torchhal.errors import AcceleratorUnavailableError, ComponentError, ConfigurationError
from torchhal.registry import AutoAccelerators, PluginRecord, RegistryEntry
from torchhal.registry._discovery import USER
from torchhal.registry._hints import DISTRIBUTIONS
from torchhal.resolve._plan import Request, ResolvedComponent
from torchhal.resolve._refusals import availability_of
from torchhal.resolve._user_arguments import component_from_instance, from_alias
from torchhal.strategies import Strategy


def choose_accelerator(request: Request, strategy: Strategy | None, notes: list[str]) -> ResolvedComponent:
    """Return the accelerator; those that "auto" skipped are reported in a note."""
    asked = request.accelerator
    is_auto = isinstance(asked, str) and asked.lower() == "auto"
    inside = None if strategy is None else strategy.given["accelerator"]
    if inside is not None:
        same = asked is inside or (isinstance(asked, str) and asked.lower() == getattr(inside, "name", None))
        if not is_auto and not same:
            raise ConfigurationError(
                f"the accelerator is given more than once: {asked!r} (accelerator=) and {inside!r} (inside "
                f"{strategy!r}); give it in one place"
            )
        part = component_from_instance("accelerator", inside, f"given inside {strategy!r}")
    elif is_auto:
        return _best(strategy if strategy is not None else request.strategy, notes)
    elif isinstance(asked, str):
        part = from_alias("accelerator", asked, f"accelerator={asked!r}")
    else:
        part = component_from_instance("accelerator", asked, "given as an object")
    type(part.value).require_available()
    return part


def _class_of(strategy: Any) -> type[Strategy] | None:
    """Return the class of a strategy, for its declared accelerators; errors of a named one are raised later."""
    if not isinstance(strategy, str):
        return type(strategy)
    if strategy.lower() == "auto":
        return None
    try:
        cls: type[Strategy] = registry.find("strategy", strategy).load()
    except ComponentError:
        return None
    return cls


@dataclass
class _Candidate:
    name: str
    distribution: str
    entry: RegistryEntry | None
    """None: what its distribution declares is missing, so its manifest was not imported."""
    priority: int | None
    """None: the query itself failed. Of one without an entry: the default of the contract."""
    reason: str
    """Why it can't be used; empty where it can."""


def _best(strategy: Any, notes: list[str]) -> ResolvedComponent:
    """Return the available accelerator with the highest priority that ``strategy``, an object or a name, works on."""
    asked = registry.auto_accelerators()
    candidates = _candidates(asked)
    usable = [candidate for candidate in candidates if not candidate.reason]
    unusable = [candidate for candidate in candidates if candidate.reason]
    wanted = _class_of(strategy)
    fitting = [candidate for candidate in usable if _suits(candidate, wanted, strategy)]
    broken = _broken_plugins(asked.plugins)
    if not fitting:
        reasons = [f"{candidate.name}: {candidate.reason}" for candidate in unusable]
        if wanted is not None:
            reasons += [f"{candidate.name}: {wanted.__name__} doesn't work on it" for candidate in usable]
        reason = "; ".join([*reasons, *broken]) or "none is installed"
        raise AcceleratorUnavailableError(
            f"accelerator='auto' finds none that can be used here: {reason}", alias="auto", reason=reason
        )
    best = max(candidate.priority or 0 for candidate in fitting)
    winners = [candidate for candidate in fitting if candidate.priority == best]
    own = [winner for winner in winners if winner.distribution == "torchhal"]
    if len(winners) > 1 and own:
        others = ", ".join(repr(winner.name) for winner in winners if winner not in own)
        notes.append(
            f"accelerator='auto' takes {own[0].name!r}; {others} claims the same auto_priority and is taken when named"
        )
        winners = own
    if len(winners) > 1:
        names = ", ".join(repr(winner.name) for winner in winners)
        raise ConfigurationError(f"accelerator='auto' finds several equally good accelerators ({names}): name one")
    missed = [f"{candidate.name}: {candidate.reason}" for candidate in _missed(unusable, usable, best)]
    if missed or broken:
        notes.append(
            f"accelerator='auto' takes {winners[0].name!r}; installed but unusable: {'; '.join([*missed, *broken])}"
        )
    if own and (device := undriven_device(asked.entries, asked.plugins)):
        notes.append(f"accelerator='auto' takes {winners[0].name!r}, but {device}, or say which you mean")
    reason, entry = "accelerator='auto': the best one available here", winners[0].entry
    assert entry is not None  # only those are unusable
    return ResolvedComponent("accelerator", winners[0].name, entry.create(), reason)


def undriven_device(entries: Iterable[RegistryEntry], plugins: Iterable[PluginRecord]) -> str:
    """Return a device that torch itself detects here and none of ``entries`` drives, and what to install; or "".

    An extension's device (PrivateUse1) is not included, as the user has imported it. Nor is one whose plugin among
    ``plugins`` the user has disabled.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == torch._C._get_privateuse1_backend_name():
        return ""
    if device.type in {_device_type(entry) for entry in entries} or not torch.accelerator.is_available():
        return ""
    distribution = DISTRIBUTIONS.get(device.type)
    if any(plugin.status == "disabled" and plugin.distribution == distribution for plugin in plugins):
        return ""
    remedy = f"pip install {distribution}" if distribution else "install or write a plugin that does"
    return f"torch sees a device of type {device.type!r} here, which nothing that is installed drives: {remedy}"


def _device_type(entry: RegistryEntry) -> str:
    try:
        return str(entry.load().device_type)
    except ComponentError:
        return ""


def _missed(unusable: list[_Candidate], usable: list[_Candidate], best: int) -> list[_Candidate]:
    """Return the candidates that might have been taken.

    Only the first of each distribution: a package for several kinds of hardware is installed for one of them.
    """
    served = {candidate.distribution for candidate in usable} - {USER}
    missed: list[_Candidate] = []
    for candidate in sorted(unusable, key=lambda candidate: -(candidate.priority or 0)):
        distribution = candidate.distribution
        if candidate.priority is not None:  # else its class doesn't load
            if candidate.priority < best or distribution in served:
                continue
            served |= {distribution} - {USER}
        missed.append(candidate)
    return missed


def _candidates(asked: AutoAccelerators) -> list[_Candidate]:
    aliases = [entry.component.alias for entry in asked.entries] + [alias for alias, _, _ in asked.missing]
    candidates = []
    for alias, distribution, reason in asked.missing:
        name = alias if aliases.count(alias) == 1 else f"{distribution}/{alias}"
        candidates.append(_Candidate(name, distribution, None, Accelerator.auto_priority, reason))
    for entry in asked.entries:
        alias = entry.component.alias
        name = alias if aliases.count(alias) == 1 else entry.qualified_name
        availability = entry.availability()
        try:
            cls = entry.load()
        except ComponentError as error:
            candidates.append(_Candidate(name, entry.distribution, entry, None, availability.reason or str(error)))
            continue
        if cls.auto_priority is None:
            continue
        availability = availability and availability_of(cls)
        reason = "" if availability else availability.reason
        candidates.append(_Candidate(name, entry.distribution, entry, cls.auto_priority, reason))
    return candidates


def _suits(candidate: _Candidate, wanted: type[Strategy] | None, strategy: Any) -> bool:
    if wanted is None or wanted.accelerators is None:
        return True
    assert candidate.entry is not None
    cls = candidate.entry.load()
    if wanted.accelerators & {candidate.entry.component.alias, cls.name}:
        return True
    # the name may select another strategy on this hardware
    return isinstance(strategy, str) and strategy.lower() in cls.substitutes.get("strategy", {})


def _broken_plugins(plugins: Iterable[PluginRecord]) -> list[str]:
    """Return plugins that might have brought an accelerator, had they loaded."""
    lines = []
    for record in plugins:
        if record.status in ("broken", "incompatible"):
            lines.append(str(record))
        lines += [f"{e}: {e.problem}" for e in record.components if e.kind == "accelerator" and e.problem]
    return lines
