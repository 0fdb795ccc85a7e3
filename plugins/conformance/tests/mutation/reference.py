"""Name the files that are mutated, copy them as a package of their own, and name the components made of the copies.

The kit and the mutants stand on the same core. So the core is left as it is: the mutated files are written once more,
as modules of the package ``mutated``, whose classes import each other; all else they import is the core's. A carrier is
a component whose class is such a copy with the core's own class as its last base, so that it passes for one of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torchhal

ROOT: Final = Path(torchhal.__file__).parent
PACKAGE: Final = "mutated"


@dataclass(frozen=True)
class Carrier:
    """A component that is made of the copies.

    Attributes:
        name: as in messages.
        module: of its class, below the package's root, such as ``"precision.mixed"``.
        cls: name of its class.
        alias: the alias under which the kit is told of it.
        defaults: for the constructor.
        options: other arguments of ``ComponentUnderTest.of``.
        left_out: ids of checks that the component can't be given, as in ``test_builtin.py``.
        real: ``module:Class`` of the core's or a plugin's own class; default: the original of the copy.
        body: lines of the carrier's class.
    """

    name: str
    module: str
    cls: str
    alias: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    real: str = ""
    body: str = "pass"

    @property
    def class_name(self) -> str:
        """The name of its class in the module ``carriers``."""
        return re.sub(r"\W", "_", f"{self.cls}_{self.name}")


@dataclass(frozen=True)
class Kind:
    """What is mutated of one kind of component, and what is checked then."""

    files: tuple[str, ...]
    carriers: tuple[Carrier, ...]


_ENV_TABLES: Final = [
    {
        "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "NODE_RANK": str(rank // 2), "NNODES": "2", "RANK": str(rank),
        "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
    }
    for rank in range(4)
]  # fmt: skip

KINDS: Final[dict[str, Kind]] = {
    "accelerator": Kind(
        ("accelerators/_devices.py", "accelerators/_statistics.py", "accelerators/base.py", "accelerators/cpu.py"),
        (
            Carrier("cpu", "accelerators.cpu", "CPUAccelerator"),
            Carrier(
                "sim", "accelerators.base", "Accelerator", real="torchhal_simulator.accelerator:SimAccelerator",
                body=(
                    "locals().update({k: v for k, v in vars(Real).items() if not k.startswith('__')})\n"
                    "    @classmethod\n    def load(cls, real=Real):\n"
                    "        known = hasattr(torch, 'sim')\n"
                    "        real.load()\n"
                    "        if not known:  # as a library that doesn't look at torch's seed\n"
                    "            torch.sim.manual_seed_all(0)"
                ),
            ),
            Carrier("absent", "accelerators.base", "Accelerator", alias="xpu", body="name = device_type = 'xpu'"),
            Carrier(
                "broken", "accelerators.base", "Accelerator", alias="xpu",
                body=(
                    "name = device_type = 'xpu'\n    @classmethod\n    def load(cls):\n"
                    "        raise ImportError('libvendor.so is missing')"
                ),
            ),
        ),
    ),
    "precision": Kind(
        ("precision/_casting.py", "precision/base.py", "precision/mixed.py", "precision/true_precision.py"),
        (
            Carrier("bf16-true", "precision.true_precision", "TruePrecision", defaults={"dtype": "bfloat16"}),
            Carrier(
                "16-mixed", "precision.mixed", "MixedPrecision", defaults={"dtype": "float16"},
                left_out=("PRE-30",),  # it applies to a class that overrides optimizer_state_dtype, as a copy seems to
            ),
            Carrier("bf16-mixed", "precision.mixed", "MixedPrecision", defaults={"dtype": "bfloat16"}),
            Carrier("32-true", "precision.true_precision", "SinglePrecision"),
            Carrier("16-true", "precision.true_precision", "TruePrecision", defaults={"dtype": "float16"}),
            Carrier("64-true", "precision.true_precision", "TruePrecision", defaults={"dtype": "float64"}),
        ),
    ),
    "checkpoint_io": Kind(
        tuple(
            f"checkpoint/{name}.py"
            for name in (
                "_checksum", "_local_file", "_locate", "_location", "_map_location", "_save_time", "_temp_files",
                "_validation", "base", "torch_file",
            )
        ),
        (
            Carrier("torch", "checkpoint.torch_file", "TorchCheckpointIO"),
            Carrier(
                "bare", "checkpoint.base", "CheckpointIO", real="torchhal.checkpoint.base:CheckpointIO",
                body=(
                    "def save_checkpoint(self, checkpoint, path, *, storage_options=None):\n"
                    "        Torch().save_checkpoint(checkpoint, path, storage_options=storage_options)\n"
                    "    def load_checkpoint(self, path, *, map_location='cpu', weights_only=True):\n"
                    "        return Torch().load_checkpoint(path, map_location=map_location, weights_only=weights_only)"
                ),
                # it doesn't say which files are its own, and so they are another IO's
                left_out=("CIO-30", "SYS-03"),
            ),
        ),
    ),
    "cluster_environment": Kind(
        tuple(f"cluster/{name}.py" for name in ("_env_vars", "_external", "base", "env_init", "local", "torchelastic")),
        (
            Carrier("torchelastic", "cluster.torchelastic", "TorchElasticEnvironment"),
            Carrier("local", "cluster.local", "LocalEnvironment"),
            Carrier(
                "env", "cluster.env_init", "EnvVarEnvironment", options={"tables": _ENV_TABLES}, left_out=("ENV-06",)
            ),
        ),
    ),
    "strategy": Kind(
        tuple(
            f"strategies/{name}.py"
            for name in (
                "_attributes", "_ddp_state", "_communication", "_optimizer_state", "_state", "_steps", "base", "ddp",
                "parallel", "single_device",
            )
        ),
        (
            Carrier("single_device", "strategies.single_device", "SingleDeviceStrategy"),
            Carrier("ddp", "strategies.ddp", "DDPStrategy"),
            Carrier(
                "ddp_find_unused_parameters_true", "strategies.ddp", "DDPStrategy",
                defaults={"find_unused_parameters": True},
            ),
            Carrier(
                "averaging", "strategies.parallel", "ParallelStrategy",
                real="torchhal.strategies.parallel:ParallelStrategy",
                body=(
                    "compares_replicas = synchronizes_batchnorms = True\n"
                    "    def backward(self, loss, *args, **kwargs):\n"
                    "        super().backward(loss, *args, **kwargs)\n"
                    "        self.sync_gradients()"
                ),
            ),
        ),
    ),
}  # fmt: skip
"""Kind of component -> what is mutated of it."""


ELSEWHERE: Final = {
    "precision/base.py:connected": "strategies call it, and the core's own",
    "precision/_casting.py:cast_by_name": "the Trainer calls it in a launched process, and the core's own",
    "precision/_casting.py:_kind": "cast_by_name alone calls it",
    "checkpoint/_map_location.py:read": "IOs of folders call it, and consolidation",
    "checkpoint/_map_location.py:_read": "read alone calls it",
    "checkpoint/_map_location.py:apply_map_location": "IOs of folders call it",
    "checkpoint/_map_location.py:apply_map_location.move": "apply_map_location alone calls it",
    "checkpoint/_local_file.py:LocalPlace.is_taken": "the Trainer's records of runs call it",
    "checkpoint/_local_file.py:LocalPlace.version": "the Trainer's records of runs call it",
    "checkpoint/_local_file.py:LocalPlace.create": "the Trainer's records of runs call it",
    "checkpoint/_local_file.py:LocalPlace.write": "the Trainer's records of runs call it",
    "checkpoint/_local_file.py:LocalPlace._beside": "create and write alone call it",
    "checkpoint/_temp_files.py:is_untouched": "places behind URLs call it, and IOs of folders",
    "strategies/_optimizer_state.py:parameters_without_state": "the Trainer calls it in a resume",
}
"""Functions of these files that no component calls -> who does: of these no mutants are made."""


def read_sources(kind: str) -> dict[str, str]:
    """Return the files of ``kind`` and their text."""
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in KINDS[kind].files}


def write_package(folder: Path, kind: str, sources: Mapping[str, str]) -> None:
    """Write ``sources`` and the carriers as the package ``mutated`` in ``folder``."""
    root = folder / PACKAGE
    for file, text in sources.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in (root, path.parent):
            (package / "__init__.py").touch()
        path.write_text(_takes_errors(_imports_copies(text, sources), file), encoding="utf-8")
    (root / "carriers.py").write_text(_carriers(kind), encoding="utf-8")


def target(carrier: Carrier) -> str:
    """Return the carrier's ``module:Class``."""
    return f"{PACKAGE}.carriers:{carrier.class_name}"


_COPIES_FIRST: Final = """\
def copies_first(copy, real):
    \"\"\"Return a metaclass that puts what ``real`` alone is derived from last.

    A class that both are derived from would put the originals before the copies of what comes after it, and so between
    a copy's method and the copy that its ``super()`` means.
    \"\"\"

    class CopiesFirst(type(copy)):
        def mro(cls):
            found = super().mro()
            originals = [one for one in found if one in real.__mro__ and one not in copy.__mro__]
            return [*(one for one in found[:-1] if one not in originals), *originals, object]

    return CopiesFirst
"""


def _carriers(kind: str) -> str:
    lines = ["import torch", _COPIES_FIRST]
    if kind == "checkpoint_io":
        lines.append(f"from {PACKAGE}.checkpoint.torch_file import TorchCheckpointIO as Torch")
    for one in KINDS[kind].carriers:
        module, _, cls = (one.real or f"torchhal.{one.module}:{one.cls}").partition(":")
        lines += [
            f"try:\n    from {module} import {cls} as Real",
            "except ImportError:  # a plugin that isn't installed\n    Real = None",
            f"from {PACKAGE}.{one.module} import {one.cls} as Copy",
            f"if Real is not None:\n    class {one.class_name}(Copy, Real, metaclass=copies_first(Copy, Real)):",
            "        " + one.body.replace("\n", "\n    "),
        ]
    return "\n".join(lines) + "\n"


def _imports_copies(text: str, sources: Mapping[str, str]) -> str:
    """Return ``text`` with its imports from the files in ``sources`` led to the copies."""
    for file in sources:
        package, _, name = file.removesuffix(".py").partition("/")
        text = re.sub(rf"\bfrom torchhal\.{package}\.{name} import\b", f"from {PACKAGE}.{package}.{name} import", text)
        text = re.sub(rf"\bfrom torchhal\.{package} import {name}\b", f"from {PACKAGE}.{package} import {name}", text)
    return text


def _takes_errors(text: str, file: str) -> str:
    """Return ``text`` with the core's own errors and protocols: callers know these by identity."""
    module = "torchhal." + file.removesuffix(".py").replace("/", ".")
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith(("Error", "Protocol")) for base in node.bases
        ):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
            assert node.end_lineno is not None
            lines[first : node.end_lineno] = [f"from {module} import {node.name}\n"]
    return "".join(lines)
