"""A loop of a user's own on two ranks, by torchhal.Run, beside the plain one: the script runs again for rank 1."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4] / "core" / "tests"))

import run_loops

found = run_loops.by_run("regression", "bagua")
if os.environ.get("RANK", "0") == "0":
    run_loops.same(found, run_loops.by_plain("regression"))
    print("all right")
