"""Installs Colossal-AI 0.5.0 beside the torch of this interpreter, with what it imports; half a minute.

    .venv-colossalai/bin/python plugins/colossalai/environment/install.py

Colossal-AI asks for torch<=2.5.1, and runs with torch 2.13: so it is installed without its requirements. Those that it
imports are the extra ``vendor`` of this plugin; the rest (Ray, FastAPI, ...) is for parts of it that aren't used here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

VERSION = "0.5.0"
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements() -> list[str]:
    """Return the extra ``vendor``, read without tomllib, which Python 3.10 hasn't got."""
    section = re.search(r"^vendor = \[\n(.*?)^\]", PROJECT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert section is not None
    return re.findall(r'"(.+?)"', section[1])


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    subprocess.run([*pip, *requirements(), f"torch=={torch}"], check=True)
    subprocess.run([*pip, "--no-deps", f"colossalai=={VERSION}"], check=True)
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import colossalai.booster.plugin"], check=True)


if __name__ == "__main__":
    main()
