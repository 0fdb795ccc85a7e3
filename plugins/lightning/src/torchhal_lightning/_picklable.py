"""Ask whether a value can go to another process."""

from __future__ import annotations

import pickle


def is_picklable(value: object) -> bool:
    """Whether pickle can write it."""
    try:
        pickle.dumps(value)
    except Exception:  # what it raises depends on the object
        return False
    return True
