"""Installs fairscale 0.4.13, pure Python, for this interpreter, without building its C++ extensions; seconds.

    .venv-fairscale/bin/python plugins/fairscale/environment/install.py

The last release is a source distribution whose build wants setuptools and wheel; its requirements torch and numpy are
in the environment already, and no other version of torch is to take their place.
"""

from __future__ import annotations

import subprocess
import sys

VERSION = "0.4.13"


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "setuptools<81", "wheel"], check=True)
    subprocess.run([*pip, "--no-deps", f"fairscale=={VERSION}"], check=True)
    subprocess.run([sys.executable, "-c", "import fairscale.nn, fairscale.optim"], check=True)


if __name__ == "__main__":
    main()
