"""GEN: discovering a plugin costs nothing and changes nothing in the process."""

from __future__ import annotations

import os
from typing import Any, Final

import importlib_metadata
import torch

from torchhal import registry
from torchhal.errors import TorchhalError
from torchhal.registry._entry import BASES
from torchhal_conformance import _discovery_probe as discovery_probe
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import MissingRequirement, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._torch_globals import torch_state
from torchhal_conformance.checks._plugin_facts import discovery_facts, measure_discovery, plugin_record, require_loaded

HEAVY: Final = frozenset({"torch", "numpy", "scipy", "pandas", "lightning", "tensorflow", "jax"})

MANIFEST_MS: Final = 50.0


@check("GEN-01")
def light_manifest(context: CheckContext) -> None:
    """Importing the manifest imports no torch, numpy or vendor's library, and takes less than 50 ms.

    Why: every `torchhal plugins` and every unknown alias imports all manifests; seconds each make people uninstall.
    Fix: let the manifest import torchhal.plugin and nothing else; targets are strings.
    """
    facts = discovery_facts(context)
    require_loaded(facts)
    vendors = {module for entry in plugin_record(context).components for module in entry.component.requires}
    heavy = sorted(set(facts["modules"]) & (HEAVY | vendors))
    require(not heavy, f"importing the manifest imported {', '.join(heavy)}")
    # a machine under load may be slow once
    times = [facts["record"]["load_ms"]]
    while min(times) >= MANIFEST_MS and len(times) < 3:
        measure_discovery.cache_clear()
        times.append(discovery_facts(context)["record"]["load_ms"])
    require(min(times) < MANIFEST_MS, f"importing the manifest took {min(times):.0f} ms, allowed {MANIFEST_MS:.0f}")


@check("GEN-02", needs=["posix"])
def fork_after_discovery(context: CheckContext) -> None:
    """After discovery and every availability probe, a forked child can allocate on the device.

    Why: notebooks and data loaders fork; a driver that a probe has initialised is dead in the child.
    Fix: answer availability() from metadata, files or a library's query that opens no context.
    """
    if context.component.kind != "accelerator":
        raise NotApplicable("the component is no accelerator")
    context.restart_subprocess()
    try:
        code = context.run_in_subprocess(_fork_and_allocate, context.component)
    finally:
        context.restart_subprocess()
    if isinstance(code, str):
        raise MissingRequirement(code)
    same("exit code of a forked child that allocates on the device", code, 0)


def _fork_and_allocate(component: ComponentUnderTest) -> int | str:
    for kind in BASES:
        for entry in registry.entries(kind):
            if entry.availability() and kind in ("accelerator", "cluster_environment"):
                try:
                    cls = entry.load()
                    cls.availability() if kind == "accelerator" else cls.detect()
                except TorchhalError:
                    pass
    state = component.cls.availability()
    if not state:
        return str(state.reason)
    child = os.fork()
    if not child:
        code = 1
        try:
            accelerator = component.make_accelerator()
            device = accelerator.get_parallel_devices([0])[0]
            accelerator.setup_device(device)
            code = 0 if float(torch.ones(3, device=device).sum()) == 3.0 else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@check("GEN-03")
def no_side_effects(context: CheckContext) -> None:
    """Discovery leaves the state of the process as it was, and puts nothing strange into sys.modules.

    That state is the environment, sys.path, warnings filters, signal handlers, root logger, random states, default
    dtype and device and the number of threads.

    Why: a plugin that is merely installed must not change a program that doesn't use it.
    Fix: move such code from the package's __init__ and manifest into the component's set-up.
    """
    facts = discovery_facts(context)
    require(not facts["changed"], "discovery changed " + "; ".join(facts["changed"]))
    strange = facts["strange modules"]
    require(not strange, f"sys.modules has entries that are not the modules of their names: {', '.join(strange)}")
    if os.name == "posix":
        context.restart_subprocess()
        changed = context.run_in_subprocess(_torch_changes, plugin_record(context).distribution)
        context.restart_subprocess()
        require(not changed, "discovery changed torch's " + ", ".join(changed))


def _torch_changes(distribution: str) -> list[str]:
    installed: Any = importlib_metadata.distribution(distribution)
    alone = registry.Registry(distributions=lambda: [installed], environ={})  # what a neighbour changes is not its
    before, state = torch_state(), torch.get_rng_state()
    alone.plugins()
    after = torch_state()
    if not torch.equal(torch.get_rng_state(), state):
        return ["random state"]
    return [name for name in before if before[name] != after[name]]


@check("GEN-13")
def repeatable(context: CheckContext) -> None:
    """Discovery gives the same table when it is repeated, and in another process.

    Why: a hook that registers once, or by chance, gives ranks different ideas of what exists.
    Fix: return a new list of constant records from each hook.
    """
    facts = discovery_facts(context)
    for again in facts["components again"]:
        same("the components, asked again", again, facts["components"])
    here = [[e.kind, e.component.alias, e.component.target] for e in plugin_record(context).components]
    same("the components, in another process", facts["components"], here)


@check("GEN-14")
def disabled(context: CheckContext) -> None:
    """A plugin that TORCHHAL_DISABLE_PLUGINS names is not imported.

    Why: the switch is there for the plugin whose import is the problem.
    Fix: nothing of the package may be imported from a .pth file or another package's __init__.
    """
    imported = discovery_facts(context)["imported although disabled"]
    require(not imported, f"although it is disabled, {', '.join(imported[:5])} is imported")


@check("GEN-18")
def beside_a_twin(context: CheckContext) -> None:
    """Beside another plugin with the same aliases each is ambiguous, and both qualified names find their component.

    Why: where the winner depends on the order of folders, one script means different hardware on two machines.
    Fix: give records that can be used; the look-up itself is the core's.
    """
    problems = discovery_facts(context)["beside a twin"]
    require(not problems, "; ".join(problems))


@check("GEN-20")
def no_network(context: CheckContext) -> None:
    """Discovery opens no connection, resolves no name and starts no process.

    Why: login nodes without a network hang, and an `srun` at import starts a job step.
    Fix: ask such questions in availability() or later, and from files where there are any.
    """
    events = discovery_facts(context)["events"]
    require(not events, f"discovery did {'; '.join(events[:5])}")


@check("GEN-21")
def no_leak(context: CheckContext) -> None:
    """A hundred scans and look-ups leave no more file descriptors, threads and modules than one does.

    Why: services look components up for every request.
    Fix: open nothing in a hook.
    """
    growth = discovery_facts(context)["growth"]
    told = ", ".join(f"{count} {what}" for what, count in growth.items())
    require(not growth, f"{discovery_probe.SCANS} scans left {told} more than one")


@check("GEN-22")
def quiet_manifest(context: CheckContext) -> None:
    """The manifest neither ends the process nor prints, to stdout or stderr.

    Changed: that `torchhal plugins --json` can be parsed beside it follows from this, and isn't asked by itself.

    Why: a sys.exit() at import ended users' jobs, and a banner on stdout breaks every tool that reads it.
    Fix: remove both; a manifest that can't work on a machine says so by Component.requires or availability().
    """
    facts = discovery_facts(context)
    require_loaded(facts)
    require(not facts["printed"], f"discovery printed {facts['printed'][:200]!r}")
