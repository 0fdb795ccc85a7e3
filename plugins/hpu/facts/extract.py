"""Read the vendor's public API out of its sources: ``extract.py BRIDGE > habana_frameworks.tsv``.

BRIDGE is a checkout of github.com/HabanaAI/gaudi-pytorch-bridge. How the lines read: ``tests/vendor_sources.py``. What
the vendor puts in the place of torch's functions stands under torch's names.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))
from vendor_sources import Sources, parsed, signature

ROOT = "habana_frameworks"
MODULES = (
    "autoload",
    "torch",
    "torch.core",
    "torch.core.step_closure",
    "torch.distributed.hccl",
    "torch.dynamo.compile_backend.backends",
    "torch.hpex.normalization",
    "torch.hpex.optimizers",
    "torch.hpu",
    "torch.hpu.events",
    "torch.hpu.memory",
    "torch.hpu.random",
    "torch.hpu.streams",
    "torch.utils.internal",
)
OVERWRITES = "torch/core/torch_overwrites.py"
OVERWRITTEN = {  # the wrapper's name -> whose place it takes
    "wrap_init_process_group": ("torch.distributed", "init_process_group"),
    "wrap_new_group": ("torch.distributed", "new_group"),
    "wrap_save": ("torch", "save"),
    "wrap_load": ("torch", "load"),
    "wrap_manual_seed": ("torch", "manual_seed"),
    "wrap_seed": ("torch", "seed"),
    "wrap_fork_rng": ("torch.random", "fork_rng"),
}

if __name__ == "__main__":
    package = Path(sys.argv[1]) / "python_packages" / ROOT
    lines = Sources(package, ROOT).lines(MODULES)
    for node in ast.walk(parsed(package / OVERWRITES)):
        if isinstance(node, ast.FunctionDef) and node.name in OVERWRITTEN:
            module, name = OVERWRITTEN[node.name]
            lines.add(f"{module}\t{name}\t{signature(node)}\t{ROOT}/{OVERWRITES}")
    print("\n".join(sorted(lines)))
