"""Count what a device has done since it was loaded, to assert what a piece of code makes it do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from torchhal_simulator._device_types import flavour_named, loaded


@dataclass
class Counters:
    """Counts since the device was loaded, or within :func:`counting`.

    ``operators``: kernels run, views excepted. ``h2d``, ``d2h``, ``d2d``: copies from host to device, from device
    to host, within and between devices. ``synchronizations``: times at which the host waited for the device, as it
    would on CUDA: ``.item()``, a copy that isn't ``non_blocking``, one into host memory that isn't pinned, an
    operator whose result has a shape that depends on the data, and every explicit synchronisation. Softer than CUDA: a
    ``non_blocking`` copy from host memory that isn't pinned is not counted. Collectives are not counted as copies.
    """

    operators: int = 0
    h2d: int = 0
    d2h: int = 0
    d2d: int = 0
    synchronizations: int = 0

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def counters(flavour: str | None = None) -> Counters:
    """Return the counts of what this process has made the device do so far, all indices together.

    Of the flavour that is loaded, of both together if both are, unless one is named; "sim" is loaded if none is.
    """
    from torchhal_simulator._library import load

    if flavour is not None or not loaded():
        load(flavour or "sim")
    chosen = [flavour_named(flavour)] if flavour is not None else loaded()
    counts = [Counters(*each.ops.counters()) for each in chosen]
    return Counters(*map(sum, zip(*map(astuple, counts), strict=True)))


@contextmanager
def counting(flavour: str | None = None) -> Iterator[Counters]:
    """Count what happens inside, in all threads; the object is filled in at the end.

    ::

        with counting() as counted:
            training_step(batch)
        assert counted.synchronizations == 0
    """
    before = counters(flavour)
    counted = Counters()
    try:
        yield counted
    finally:
        counted.__dict__.update((counters(flavour) - before).__dict__)
