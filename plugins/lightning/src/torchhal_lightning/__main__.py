"""Run a script in which Lightning's Trainer is torchhal's: ``python -m torchhal_lightning script.py ARGUMENT ...``.

Where Lightning isn't installed, or with ``--stand-in`` before the script, its names are the stand-in's. The script runs in this module, whose name the launchers keep: so the processes that they start run it in the same way.
"""

from __future__ import annotations

import os
import sys
from types import CodeType

from torchhal_lightning import install


_STAND_IN = "TORCHHAL_LIGHTNING_STAND_IN"
"""Variable that is set where the stand-in was asked for."""


def read_script() -> CodeType:
    """Return the code of the script that the command line names, and make ``sys.argv`` and ``sys.path`` its own.

    Raises:
        SystemExit: there is none.
    """
    if __name__ == "__main__":
        if sys.argv[1:2] == ["--stand-in"]:
            del sys.argv[1]
            os.environ[_STAND_IN] = "1"  # for the processes of a launcher, too
        if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
            raise SystemExit("usage: python -m torchhal_lightning [--stand-in] script.py ARGUMENT ...")
        del sys.argv[0]
    script = sys.argv[0]  # of a process that was spawned, too
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with open(script, "rb") as file:
        return compile(file.read(), os.path.abspath(script), "exec", dont_inherit=True)


if __name__ in ("__main__", "__mp_main__"):
    _code = read_script()
    install(stand_in=True if os.environ.get(_STAND_IN) else None)
    __file__ = os.path.abspath(sys.argv[0])
    exec(_code, globals())
