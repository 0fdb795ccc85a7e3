"""Mark the place of a tensor in a checkpoint whose tensors are saved apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """A mark where a tensor was.

    Attributes:
        name: of the tensor that is saved.
        place: size, stride and offset in that tensor's memory, of a view of it; None for the tensor itself.
    """

    name: str
    place: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
