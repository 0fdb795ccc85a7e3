"""Take away the modules of the kinds that were not asked for."""

from __future__ import annotations

from pathlib import Path

MODULES = {
    "accelerator": "accelerator.py",
    "precision": "precision.py",
    "checkpoint_io": "checkpoint.py",
    "cluster_environment": "environment.py",
    "strategy": "strategy.py",
}
WANTED = "{{ cookiecutter.__kinds }}".split(",")

for kind, module in MODULES.items():
    if kind not in WANTED:
        Path("src", "{{ cookiecutter.__package }}", module).unlink()
