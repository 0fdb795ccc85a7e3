"""Compare what the stub offers with the table; what was compared is printed."""

import importlib
import sys
from pathlib import Path

import torch

import poptorch
import poptorch.enums

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "tests"))
from vendor_facts import compare, table  # noqa: E402

KNOWN = table(ROOT / "plugins" / "ipu" / "facts")
SCOPE = {"torch": torch, **vars(poptorch.enums)}

for name in KNOWN:
    print(*compare(KNOWN, importlib.import_module(name), ("poptorch", "poptorch_stub"), SCOPE), sep="\n")
