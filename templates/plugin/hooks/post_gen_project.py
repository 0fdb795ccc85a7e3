"""Remove the modules of kinds that were not requested, and the files that pip compiled beside the template."""

from __future__ import annotations

import shutil
from pathlib import Path

MODULES = {
    "accelerator": "accelerator.py",
    "precision": "precision.py",
    "checkpoint_io": "checkpoint.py",
    "cluster_environment": "environment.py",
    "strategy": "strategy.py",
    "logger": "logger.py",
    "callback": "callback.py",
}
WANTED = "{{ cookiecutter.__kinds }}".split(",")

for kind, module in MODULES.items():
    if kind not in WANTED:
        Path("src", "{{ cookiecutter.__package }}", module).unlink()

# pip compiles every .py file that it installs, those of the template too, and cookiecutter copies all that it finds.
for cache in list(Path().rglob("__pycache__")):
    shutil.rmtree(cache)
