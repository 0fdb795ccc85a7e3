"""Run a script in which Lightning's Trainer is torchhal's: ``python -m torchhal_lightning script.py ARGUMENT ...``.

Where Lightning isn't installed, or with ``--stand-in`` before the script, its names are the stand-in's. The script runs
in this module. The processes that launchers start run it through ``torchhal_lightning._script``, also those of
multiprocessing, which never runs a module named ``__main__`` again.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from torchhal_lightning import _script


def _read_arguments() -> None:
    """Leave in ``sys.argv`` what is the script's, and note the rest for all processes."""
    del sys.argv[0]
    os.environ.pop(_script.STAND_IN, None)
    if sys.argv[:1] == ["--stand-in"]:
        del sys.argv[0]
        os.environ[_script.STAND_IN] = "1"
    if not sys.argv or not os.path.isfile(sys.argv[0]):
        why = "" if not sys.argv or sys.argv[0] in ("-h", "--help") else f"there is no script {sys.argv[0]!r}\n"
        raise SystemExit(f"{why}usage: python -m torchhal_lightning [--stand-in] script.py ARGUMENT ...")
    os.environ[_script.SCRIPT] = os.path.abspath(sys.argv[0])


if __name__ == "__main__":
    _read_arguments()
    __spec__ = find_spec("torchhal_lightning._script")
    _code = _script.prepare()
    __file__ = os.environ[_script.SCRIPT]
    exec(_code, globals())
