"""Which IPU the layers are on: the largest number that a block named while the model was recorded."""

from __future__ import annotations

_ids: list[int] | None = None
_count = 0


def begin(ipu_id: int | None) -> None:
    """Begin a block; without a number it takes the next IPU."""
    global _count
    if _ids is not None:
        _ids.append(_count if ipu_id is None else ipu_id)
        _count += 1


class counting:
    """Counts the blocks that begin while it is entered."""

    def __enter__(self) -> counting:
        global _ids, _count
        _ids, _count = [], 0
        return self

    def __exit__(self, *error: object) -> None:
        global _ids
        self.ipus = max(_ids or [0]) + 1
        _ids = None
