"""Run a script in which Lightning's Trainer is torchhal's: ``python -m torchhal_lightning script.py ARGUMENT ...``."""

from __future__ import annotations

import os
import runpy
import sys

from torchhal_lightning import install


def main() -> None:
    """Run the script that the command line names.

    Raises:
        SystemExit: there is none.
    """
    if len(sys.argv) < 2 or not os.path.isfile(sys.argv[1]):
        raise SystemExit("usage: python -m torchhal_lightning script.py ARGUMENT ...")
    install()
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
