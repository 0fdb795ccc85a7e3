"""Compare what the stub offers with the table, in the mode of the environment; what was compared is printed."""

import datetime
import importlib
import pickle
import sys
from pathlib import Path

from torch.distributed.constants import default_pg_timeout

from habana_frameworks.torch.hpex.optimizers.FusedSGD import required
from habana_frameworks.torch.utils.internal import is_lazy

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "tests"))
from vendor_facts import compare, expected, parameters, table  # noqa: E402

KNOWN = table(ROOT / "plugins" / "hpu" / "facts")
VALUES = {"pickle": pickle, "datetime": datetime, "default_pg_timeout": default_pg_timeout,
          "LAZY_DEFAULT_PROTOCOL": 4, "required": required}  # fmt: skip

for module, names in KNOWN.items():
    if "transformer_engine" in module or (module.endswith(".backends") and is_lazy()):
        continue
    found = importlib.import_module(module)
    if module.startswith("habana_frameworks"):
        if hasattr(found, "__path__"):  # of modules the table has what they define
            extra = sorted(set(getattr(found, "__all__", ())) - names.keys() - {"hpu"})
            assert not extra, f"the stub's {module} has {extra}, which the vendor's has not"
        print(*compare(KNOWN, found, ("habana_frameworks",), VALUES), sep="\n")
        continue
    for name, signature in names.items():  # the bridge's, in the place of torch's
        if module in ("torch", "torch.random") and not (is_lazy() and name in ("save", "load")):
            continue  # seeds are the simulator's: torch's own signatures
        assert parameters(getattr(found, name)) == expected(signature, VALUES), f"{module}.{name}: {signature}"
        print(f"{module}.{name}")
