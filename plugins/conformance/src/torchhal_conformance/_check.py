"""Define a check: a stable id, a level, and a function whose docstring states the rule."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS

LEVELS: Final = ("core", "extended", "provisional")
"""Level -> the components that it applies to, from the lowest.

``core``: every component of the kind. ``extended``: components that declare the check's features. ``provisional``: a
check of either that is newer than the oldest release the component's distribution supports; it is reported, and changes
no verdict.
"""

PREFIXES: Final = {
    "GEN": KINDS,
    "ACC": ("accelerator",),
    "PRE": ("precision",),
    "CIO": ("checkpoint_io",),
    "ENV": ("cluster_environment",),
    "STR": ("strategy",),
    "LOG": ("logger",),
    "CBK": ("callback",),
    "SYS": KINDS,
}
"""First letters of an id -> the kinds of components that it applies to."""

NEEDS: Final = ("device", "two devices", "posix", "table")
"""Requirements of a check on the machine; ``_component_under_test.missing`` returns the reason for a missing one."""

_ID = re.compile(r"([A-Z]{3})-([0-9]{2}|[1-9][0-9]{2})")
_PARTS = re.compile(r"^(Changed|Why|Fix):", re.MULTILINE)
"""Begins a section of a check's docstring; ``Changed`` is for those who change the kit, and shown to nobody else."""


@dataclass(frozen=True)
class Check:
    """One rule of a contract.

    Attributes:
        id: such as ``"ACC-01"``; public and stable.
        function: raises when the rule is broken. Takes a ``CheckContext``; with ``world_sizes`` it runs on every rank
            and takes a ``RankContext``.
        features: what the component must declare for the check to mean anything; empty at core level.
        since: the version of torchhal that first had it.
        needs: members of :data:`NEEDS`.
        world_sizes: the numbers of processes that it runs in; empty for one that needs this process only.
        after: ids of checks that it presupposes: where one of them failed, its own failure follows from that.
        timeout: seconds after which a rank that has sent no result is a HANG.
    """

    id: str
    function: Callable[[Any], None]
    features: frozenset[str] = frozenset()
    since: str = "0.1"
    needs: frozenset[str] = frozenset()
    world_sizes: tuple[int, ...] = ()
    timeout: float = 30.0
    after: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """``extended`` with features, else ``core``."""
        return "extended" if self.features else "core"

    def level_under(self, contract: str) -> str:
        """Return the level for a component that supports ``contract``, a release such as ``"0.1"``, and later ones."""
        return "provisional" if release(self.since) > release(contract) else self.level

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of components that it applies to."""
        return PREFIXES[self.id[:3]]

    @property
    def contract(self) -> str:
        """The rule, in a sentence or two."""
        return self._section("")

    @property
    def why(self) -> str:
        """The failure that a broken rule causes, with the project that shipped it where one is known."""
        return self._section("Why")

    @property
    def fix(self) -> str:
        """The change that an author makes when the check fails."""
        return self._section("Fix")

    def _section(self, name: str) -> str:
        parts = _PARTS.split(inspect.getdoc(self.function) or "")
        sections = {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
        return " ".join(sections.get(name, "").split())


CHECKS: Final[dict[str, Check]] = {}
"""Every check by its id, sorted by family and id; filled when ``torchhal_conformance.checks`` is imported."""


def check(
    id: str,
    *,
    features: Iterable[str] = (),
    since: str = "0.1",
    needs: Iterable[str] = (),
    world_sizes: tuple[int, ...] = (),
    timeout: float = 30.0,
    after: tuple[str, ...] = (),
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register the decorated function as the check ``id``.

    Raises:
        ConfigurationError: an id of no known family or used before, an unknown need, a docstring without its ``Why:``
            and ``Fix:``.
    """

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        made = Check(id, function, frozenset(features), since, frozenset(needs), world_sizes, timeout, after)
        match = _ID.fullmatch(id)
        if match is None or match[1] not in PREFIXES or id in CHECKS:
            raise ConfigurationError(
                f"a check's id must be new and one of {', '.join(PREFIXES)} with two digits, or three from 100 on "
                f"(got {id!r})"
            )
        if not made.needs <= set(NEEDS):
            raise ConfigurationError(f"check {id} must have needs of {NEEDS} (got {needs!r})")
        if unusable := [other for other in after if not _ID.fullmatch(other) or not _sort_key(other) < _sort_key(id)]:
            raise ConfigurationError(f"'after' of check {id} must name checks that are made before it (got {unusable})")
        if not (made.contract and made.why and made.fix):
            raise ConfigurationError(f"the docstring of check {id} must state the contract, 'Why:' and 'Fix:'")
        CHECKS[id] = made
        return function

    return register


def checks_for(kind: str, *, level: str | None = None, contract: str | None = None) -> list[Check]:
    """Return the checks for components of ``kind``, sorted by id; with ``level`` those up to it.

    Args:
        kind: one of :data:`torchhal.plugin.KINDS`.
        level: one of :data:`LEVELS`.
        contract: the oldest release that the component supports, on which a check's level depends; None: the newest.

    Raises:
        ConfigurationError: an unknown kind or level.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"'kind' must be one of {', '.join(map(repr, KINDS))} (got {kind!r})")
    if level is not None and level not in LEVELS:
        raise ConfigurationError(f"'level' must be one of {', '.join(map(repr, LEVELS))} (got {level!r})")
    importlib.import_module("torchhal_conformance.checks")  # which registers them
    wanted = LEVELS if level is None else LEVELS[: LEVELS.index(level) + 1]
    mine = [one for one in CHECKS.values() if kind in one.kinds]
    return sorted(
        (one for one in mine if (one.level_under(contract) if contract else one.level) in wanted), key=_key_of
    )


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; an empty tuple where it begins with none."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else ()


def sort_checks() -> None:
    """Sort CHECKS by family and id, whatever the order in which its modules were imported."""
    ordered = sorted(CHECKS.values(), key=_key_of)
    CHECKS.clear()
    CHECKS.update((one.id, one) for one in ordered)


def _key_of(one: Check) -> tuple[int, int]:
    return _sort_key(one.id)


def _sort_key(id: str) -> tuple[int, int]:
    return list(PREFIXES).index(id[:3]), int(id[4:])


# -- what a check raises -------------------------------------------------------------------------------------


class CheckFailed(AssertionError):
    """Failure of a check: the component breaks the rule; the message holds the measured and the expected value.

    Attributes:
        raised: ``CLASS: MESSAGE`` of an error that a rank raised in the place of a measured difference; else empty.
        frames: file and line of each call in which it was raised, the innermost last.
        hung: whether nothing came until the check's time was over.
    """

    raised: str = ""
    frames: Sequence[tuple[str, int]] = ()
    hung: bool = False


class Skipped(Exception):
    """Outcome of a check that was not made.

    The reason begins with ``environment:`` when another machine could make it, and with ``input:`` when the author of
    the component could, by an argument of the suite.
    """


class MissingRequirement(Skipped):
    """Skip of a check whose requirement this machine lacks: the verdict is then ``partial``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"environment: {reason}")


class MissingInput(Skipped):
    """Skip of a check for want of an argument that only the author can give: the verdict is then ``incomplete``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"input: {reason}")


class NotGiven(Skipped):
    """Skip of a check for want of an argument that not every component has: the verdict doesn't change."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not given: {reason}")


class NotApplicable(Skipped):
    """Skip of a check that doesn't apply to the component: the verdict doesn't change."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not applicable: {reason}")
