"""Let a fork that runs the kit on one mutant fork its ranks and programs from the server that it was given."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def install(server: Any) -> None:
    path = Path(__file__).parents[4] / "tests" / "warm_start.py"
    spec = importlib.util.spec_from_file_location("warm_start", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install(server)
    vars(sys.modules["torchhal_conformance._session"])["shared_server"] = lambda: server
