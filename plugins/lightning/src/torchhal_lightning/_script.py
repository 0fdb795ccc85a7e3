"""Run the script of ``python -m torchhal_lightning`` in a process that a launcher has started."""

from __future__ import annotations

import os
import sys
from types import CodeType

from torchhal_lightning import install

SCRIPT = "TORCHHAL_LIGHTNING_SCRIPT"
"""Variable with the script's path."""
STAND_IN = "TORCHHAL_LIGHTNING_STAND_IN"
"""Variable that is set where the stand-in was asked for."""


def prepare() -> CodeType:
    """Return the script's code, and make this process one for it: ``sys.argv``, ``sys.path``, Lightning's names."""
    script = os.environ[SCRIPT]
    sys.argv[0] = script
    sys.path.insert(0, os.path.dirname(script))
    install(stand_in=True if os.environ.get(STAND_IN) else None)
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec", dont_inherit=True)


if __name__ in ("__main__", "__mp_main__"):
    _code = prepare()
    __file__ = os.environ[SCRIPT]
    exec(_code, globals())
