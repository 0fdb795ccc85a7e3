"""What comes before the first import of the library: importing this checks that it may be, and prepares the process."""

from __future__ import annotations

import os

import habana_frameworks.autoload
from habana_frameworks_stub import check

check()
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
habana_frameworks.autoload.is_loaded = True  # or torch, while it is imported, would import the library again
