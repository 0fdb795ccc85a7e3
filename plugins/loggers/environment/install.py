"""Installs the libraries of the experiment services into this interpreter's environment.

    .venv-loggers/bin/python plugins/loggers/environment/install.py

By uv, which needs a minute where pip needs ten; pip where uv can't. The whole of mlflow, for its server.
"""

from __future__ import annotations

import subprocess
import sys

REQUIREMENTS = ("mlflow==3.17.2", "wandb==0.31.0", "comet_ml==3.58.8", "swanlab==0.10.3", "trackio==0.43.0", "pillow")


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*pip, "uv"], check=True)
    if subprocess.run([*uv, *REQUIREMENTS], check=False).returncode:
        subprocess.run([*pip, *REQUIREMENTS], check=True)


if __name__ == "__main__":
    main()
