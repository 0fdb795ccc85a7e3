"""Resolve requests for tests, with accelerators that torch knows and plugins that exist in memory only."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from importlib_metadata import Distribution

from torchhal.accelerators import Accelerator
from torchhal.capabilities import autocast, compute, store
from torchhal.plugin import HOOKS, Availability
from torchhal.resolve import Plan, Request, resolve

RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHHAL_LAUNCH_ID",
)  # fmt: skip

# Two nodes of two processes, as torchrun 2.13 sets them for the second process of the second node.
TORCHRUN = {
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "RANK": "3", "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "4",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}  # fmt: skip


class Fake(Accelerator):
    """Four devices that torch knows but this machine lacks; nothing in here touches one."""

    name: ClassVar[str] = "fake"
    device_type: ClassVar[str] = "meta"
    capabilities: ClassVar[frozenset[str]] = (
        store(torch.float32) | compute(torch.float32, torch.bfloat16) | autocast(torch.bfloat16)
    )
    count: ClassVar[int] = 4
    reason: ClassVar[str] = ""

    @classmethod
    def availability(cls) -> Availability:
        return Availability(not cls.reason, cls.reason)

    def device_count(self) -> int:
        return self.count


def fake(name: str, **attributes: Any) -> type[Fake]:
    return type(name.title(), (Fake,), {"name": name, **attributes})


def plan(**request: Any) -> Plan:
    return resolve(Request(**request))


def choices(found: Plan) -> dict[str, str]:
    return {what: choice for what, choice, _ in found.rows()}


def reason(found: Plan, of: str) -> str:
    return {what: why for what, _, why in found.rows()}[of]


class Package(Distribution):
    """A distribution in memory with one plugin; ``broken`` is what its manifest raises."""

    def __init__(self, name: str, *, broken: str = "", **components: Any) -> None:
        self.label = name
        self.module = name.replace("-", "_") + "_manifest"
        body = [f"raise {broken}"] if broken else []
        targets = {
            "accelerator": f"{__name__}:Fake",
            "strategy": "torchhal.strategies.ddp:DDPStrategy",
            "checkpoint_io": "torchhal.checkpoint:TorchCheckpointIO",
        }
        for kind, alias in components.items():
            alias, target = alias if isinstance(alias, tuple) else (alias, targets[kind])
            body += ["@hookimpl", f"def {HOOKS[kind]}():", f"    return [Component({alias!r}, {target!r})]"]
        module = type(sys)(self.module)
        source = "\n".join(["from torchhal.plugin import Component, hookimpl", *body])
        self.loader = _Source(self.module, source)
        del module

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self.label}\nVersion: 1.0\n"
        if filename == "entry_points.txt":
            return f"[torchhal]\n{self.label} = {self.module}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        return path


class _Source:
    """A finder and loader of one module from a string."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        sys.modules.pop(name, None)
        sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "name", None) != name or not isinstance(f, _Source)]
        sys.meta_path.append(self)

    def find_spec(self, name, path=None, target=None):
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.source, module.__dict__)


def forget_packages() -> None:
    """Remove the modules of every :class:`Package` that was made."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Source)]:
        sys.meta_path.remove(finder)
        sys.modules.pop(finder.name, None)
