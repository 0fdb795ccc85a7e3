"""Installs fairscale 0.4.13 for this interpreter: pure Python, without its extensions for CUDA; seconds.

    .venv-fairscale/bin/python plugins/fairscale/environment/install.py

Its requirements, torch and numpy, are in the environment already, and no other torch is to take the place of that.
"""

from __future__ import annotations

import subprocess
import sys

VERSION = "0.4.13"


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", f"fairscale=={VERSION}"], check=True)
    subprocess.run([sys.executable, "-c", "import fairscale.nn, fairscale.optim"], check=True)


if __name__ == "__main__":
    main()
