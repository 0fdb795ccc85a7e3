"""Run a script in which Lightning's Trainer is torchhal's: ``python -m torchhal_lightning script.py ARGUMENT ...``.

The script runs in this module, whose name the launchers keep: so the processes that they start run it in the same way.
"""

from __future__ import annotations

import os
import sys
from types import CodeType

from torchhal_lightning import install


def read_script() -> CodeType:
    """Return the code of the script that the command line names, and make ``sys.argv`` and ``sys.path`` its own.

    Raises:
        SystemExit: there is none.
    """
    if __name__ == "__main__":
        if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
            raise SystemExit("usage: python -m torchhal_lightning script.py ARGUMENT ...")
        del sys.argv[0]
    script = sys.argv[0]  # of a process that was spawned, too
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with open(script, "rb") as file:
        return compile(file.read(), os.path.abspath(script), "exec", dont_inherit=True)


if __name__ in ("__main__", "__mp_main__"):
    _code = read_script()
    install()
    __file__ = os.path.abspath(sys.argv[0])
    exec(_code, globals())
