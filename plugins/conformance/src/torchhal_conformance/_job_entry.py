"""Run the call in a file of ``_subprocesses.call``: ``python -m torchhal_conformance._job_entry FILE``."""

from __future__ import annotations

import importlib
import pickle
import sys


def main(path: str) -> None:
    with open(path, "rb") as file:
        module, name, arguments = pickle.load(file)
    getattr(importlib.import_module(module), name)(*arguments)


if __name__ == "__main__":
    main(sys.argv[1])
