"""GEN: a plugin's requirement, wheel and source, and its use of private names."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from torchhal import registry
from torchhal.errors import ComponentError
from torchhal.registry._discovery import canonical
from torchhal.registry._entry import BASES, resolve_target
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import MissingRequirement, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._extension_api import foreign_uses, overridden_private_names
from torchhal_conformance.checks._plugin_facts import discovery_facts, measure_discovery, plugin_record


@check("GEN-12")
def bounded_requirement(context: CheckContext) -> None:
    """The distribution requires torchhal with a lower and an upper bound, between which the running version lies.

    What it requires only with an extra of its own doesn't count.

    Why: a plugin without an upper bound is installed beside the next major version, and breaks there.
    Fix: dependencies = ["torchhal>=0.2,<1"].
    """
    from packaging.requirements import Requirement

    import torchhal

    found = [Requirement(text) for text in discovery_facts(context)["requires_dist"]]
    always = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    ours = [one for one in always if canonical(one.name) == "torchhal"]
    require(ours, "the distribution doesn't require torchhal")
    operators = {one.operator for requirement in ours for one in requirement.specifier}
    bounded = operators & {"==", "~="} or (operators & {">", ">="} and operators & {"<", "<="})
    require(bounded, f"the requirement must have a lower and an upper bound (got {', '.join(map(str, ours))})")
    version = torchhal.__version__
    inside = all(one.specifier.contains(version, prereleases=True) for one in ours)
    require(inside, f"torchhal {version} is outside of {', '.join(map(str, ours))}")


@check("GEN-15")
def public_names(context: CheckContext) -> None:
    """The package's source imports from torchhal what docs/reference/extension-api.md lists, and nothing else.

    Its classes override no method and no attribute of torchhal's that begins with an underscore.

    Why: anything else may change in a patch release, and the plugin is then broken for everybody at once.
    Fix: use a name of the extension API, or ask for one.
    """
    record = plugin_record(context)
    root = Path(discovery_facts(context)["record"]["file"]).parent
    problems = [
        f"{file.name}:{line} {use}"
        for file in sorted(root.rglob("*.py"))
        for line, use in foreign_uses(file.read_text(encoding="utf-8"))
    ]
    context.restart_subprocess()
    problems += context.run_in_subprocess(_private_overrides, record.distribution, str(root))
    require(not problems, "; ".join(problems[:10]))


def _private_overrides(distribution: str, root: str) -> list[str]:
    _load_available(distribution)
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and Path(file).is_relative_to(root):
            source = Path(file).read_text(encoding="utf-8")
            found += [f"{Path(file).name}:{line} {use}" for line, use in overridden_private_names(source, vars(module))]
    return sorted(found)


def _load_available(distribution: str) -> None:
    """Load the classes of a distribution that can be used here."""
    for kind in BASES:
        for entry in registry.entries(kind):
            if entry.distribution == distribution and entry.availability():
                try:
                    entry.load()
                except ComponentError:
                    pass


@check("GEN-16", needs=["posix"])
def no_patching(context: CheckContext) -> None:
    """Loading the plugin's classes rebinds no attribute of torchhal, torch and torch.distributed, nn and optim.

    Why: a patch acts on every user of the process, and two plugins that patch one place depend on their order.
    Fix: subclass and override; where that can't be done, patch in the component's set-up and restore in its teardown.
    """
    record = plugin_record(context)
    context.restart_subprocess()
    rebound = context.run_in_subprocess(_rebound_by_loading, record.distribution)
    context.restart_subprocess()
    require(not rebound, f"loading the classes rebound {', '.join(rebound[:8])}")


def _rebound_by_loading(distribution: str) -> list[str]:
    owners: list[Any] = [
        torch,
        torch.distributed,
        torch.nn,
        torch.optim,
        torch.Tensor,
        torch.nn.Module,
        torch.optim.Optimizer,
    ]
    owners += [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torchhal"]
    owners += [resolve_target(target) for target in BASES.values()]
    before = [(owner, dict(vars(owner))) for owner in owners]
    _load_available(distribution)
    rebound = []
    for owner, names in before:
        now = vars(owner)
        label = getattr(owner, "__name__", repr(owner))
        changed = {name: now.get(name) for name, value in names.items() if now.get(name) is not value}
        changed = {name: value for name, value in changed.items() if not _made_by_torch(value)}
        rebound += [f"{label}.{name}" for name in changed if not name.startswith("__")]
    # the registry's own records of what was found
    return [name for name in rebound if not name.startswith("torchhal_conformance")]


def _made_by_torch(value: Any) -> bool:
    """Return True for a function of torch's own files: importing more of torch wraps some of its functions."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__) + os.sep)


@check("GEN-17", features=["wheel"], timeout=120)
def wheel(context: CheckContext) -> None:
    """A wheel built from the source holds the same components, py.typed, a licence, a summary and a URL.

    Changed: the wheel is unpacked into a folder of its own, not installed into a new environment, which would need an
    index for torch.

    Why: an entry point or a data file that is missing from the wheel works for the author and for nobody else.
    Fix: name the package in the build backend's configuration and fill in [project].
    """
    record = plugin_record(context)
    source = context.component.source
    if source is None:
        raise MissingRequirement("its source is not here: install the plugin with pip install --editable")
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--wheel-dir", str(context.folder), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = list(context.folder.glob("*.whl"))
    require(build.returncode == 0 and wheels, f"the wheel could not be built:\n{build.stderr[-2000:]}")
    site = context.folder / "site"
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(site)
    package = discovery_facts(context)["manifest"].partition(".")[0]
    metadata: Any = importlib.metadata.PathDistribution(next(site.glob("*.dist-info"))).metadata
    require((site / package / "py.typed").exists(), f"the wheel has no {package}/py.typed")
    for names in (("License-Expression", "License", "License-File"), ("Summary",), ("Project-URL", "Home-page")):
        require(any(metadata.get(name) for name in names), f"the wheel's metadata has no {' or '.join(names)}")
    others = tuple(folder for folder in sys.path if not (Path(folder or ".") / package).is_dir())
    found = json.loads(measure_discovery(record.distribution, record.name, (str(site), *others)))
    same("the components that the wheel gives", found["components"], discovery_facts(context)["components"])
