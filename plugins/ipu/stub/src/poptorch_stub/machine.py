"""The machine's IPUs: a few, each taken by one executable at a time, given out in powers of two."""

from __future__ import annotations

import os
import weakref
from typing import Final

VARIABLE: Final = "POPTORCH_STUB_IPUS"


class Error(Exception):
    """What poptorch raises for its own errors."""


class RecoverableError(Error):
    """An error after which the IPUs can be reset."""


class UnrecoverableError(Error):
    """An error after which they can't."""


def installed() -> int:
    """How many IPUs there are; 4 unless the environment says otherwise."""
    return int(os.environ.get(VARIABLE, "4"))


_taken: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def free() -> int:
    return installed() - sum(_taken.values())


def attach(owner: object, count: int) -> None:
    """Take ``count`` IPUs for ``owner``.

    Raises:
        Error: there are not that many, or others have them.
    """
    if count > installed():
        raise Error(f"{count} IPU(s) are asked for, and this machine has {installed()}")
    if count > free():
        raise Error(f"{count} IPU(s) are asked for, and {free()} of {installed()} are free: other models have the rest")
    _taken[owner] = count


def detach(owner: object) -> None:
    _taken.pop(owner, None)


def rounded(count: int, *, allowed: bool) -> int:
    """``count`` as a power of two, in which IPUs are given out.

    Raises:
        Error: it is none, and rounding up was not ``allowed``.
    """
    power = 1 << (count - 1).bit_length()
    if power != count and not allowed:
        raise Error(
            f"IPUs are given out in powers of two, and the model is on {count}: autoRoundNumIPUs() takes {power}"
        )
    return power
