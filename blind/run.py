"""python -m blind.run KIND MODULE:CLASS [options of torchhal conformance run]: register a class and check it."""

import importlib
import re
import sys


def main():
    kind, target, *options = sys.argv[1:]
    module, _, name = target.partition(":")
    cls = getattr(importlib.import_module(module), name)
    alias = {"accelerator": "name", "cluster_environment": "name", "precision": "own_alias"}.get(kind)
    alias = getattr(cls, alias) if alias else re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower().replace("_d_d_p", "_ddp")
    alias = alias.replace("_i_o", "_io")
    import torchhal
    from torchhal.cli import main as run

    torchhal.register(kind, alias, cls)
    sys.exit(run(["conformance", "run", kind, alias, *options]))


if __name__ == "__main__":
    main()
