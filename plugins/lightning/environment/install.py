"""Installs Lightning 2.6.6 in both its distributions, what its loggers want, and the other trainers of the pages.

    .venv-lightning/bin/python plugins/lightning/environment/install.py

Torch is in the environment already, and no other is to take the place of that.
"""

from __future__ import annotations

import subprocess
import sys

PACKAGES = (
    "lightning==2.6.6",
    "pytorch-lightning==2.6.6",
    "torchmetrics>=1.8,<2",
    "tensorboard",
    "rich",
    "jsonargparse[signatures]",
    # for docs/how-to/migrate.md; where the stub of Gaudi is, Accelerate takes it for the real one
    "accelerate==1.15.0",
    "transformers==5.24.0",
)


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", "constraints.txt", *PACKAGES], check=True)
    subprocess.run([sys.executable, "-c", "import lightning.pytorch, pytorch_lightning"], check=True)


if __name__ == "__main__":
    main()
