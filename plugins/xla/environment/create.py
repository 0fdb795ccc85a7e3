"""Makes the environment in which the XLA plugin is tested: torch 2.9.1 and torch_xla 2.9.0, computing on the CPU.

    python3.11 plugins/xla/environment/create.py FOLDER

torch_xla 2.9 loads beside torch 2.9 alone, in the build that PyPI has: one for CUDA, which asks for gigabytes of
NVIDIA's libraries that nothing here ever calls. So torch comes without its dependencies, and small stand-ins for those
libraries are compiled next to it (``stubs.py``). About 1 GB to download, a minute.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TORCH = ("torch==2.9.1", "torch_xla==2.9.0")


def main(folder: Path) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit(f"torch_xla has wheels for Linux on x86-64 only (this is {platform.system()} {platform.machine()})")
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, "--requirement", str(HERE / "requirements.txt")], check=True)
    subprocess.run([*pip, "--no-deps", *TORCH], check=True)
    subprocess.run([str(python), str(HERE / "stubs.py")], check=True)
    subprocess.run([str(python), "-c", "import torch_xla"], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
