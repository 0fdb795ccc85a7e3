"""Determine the oldest release of torchhal that a distribution supports, from its requirement."""

from __future__ import annotations

from collections.abc import Iterable

import torchhal
from torchhal.registry._discovery import canonical
from torchhal_conformance._check import release


def oldest_release(requires: Iterable[str]) -> str:
    """Return the lower bound that a distribution requires of torchhal, as MAJOR.MINOR.

    Args:
        requires: the values of its ``Requires-Dist``.

    Returns:
        The lower bound, such as ``"0.1"`` of ``torchhal>=0.1.3,<1``; the running release where none is given, or a
        later one.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    newest = release(torchhal.__version__)
    bounds = []
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # the registry reports one on torchhal
            continue
        if canonical(requirement.name) != "torchhal":
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            bounds += [release(one.version) for one in requirement.specifier if one.operator in (">=", ">", "==", "~=")]
    oldest = min(max(bounds, default=newest), newest)
    return ".".join(map(str, oldest))
