"""Reserve room for the workers: a placement group, or an error with the resources that there are."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchhal.errors import LaunchError

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

TELL_AFTER = 5.0
"""Seconds without an answer after which the wait is said."""


def reserve(
    ray: Any,
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    timeout: float,
    stopped: Callable[[], bool],
) -> Any:
    """Return a placement group that is there, or None when ``stopped`` returns True first.

    Raises:
        LaunchError: there is no room within ``timeout`` seconds; what was asked, and what the cluster has.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    start, told = time.monotonic(), False
    try:
        while not group.wait(0.5):
            waited = time.monotonic() - start
            if stopped():
                remove_placement_group(group)
                return None
            if waited > timeout:
                raise LaunchError(
                    f"the Ray cluster has no room within {timeout:g} s for {asked(bundles, strategy)}. "
                    f"{present(ray)}. Ask for less, free some of it, add nodes, or wait longer with "
                    "RayEnvironment(timeout=...)"
                )
            if waited > TELL_AFTER and not told:
                told = True
                print(
                    f"torchhal: waits up to {timeout:g} s for room on the Ray cluster: {asked(bundles, strategy)}. "
                    f"{present(ray)}",
                    file=sys.stderr,
                    flush=True,
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def of_trial(ray: Any, bundles: Sequence[Mapping[str, float]]) -> Any:
    """Return the placement group of the trial in this process, whose bundles but the first are for ``bundles``.

    A group of the launcher's own would outlive a trial that its scheduler ends, for Ray Tune kills its process and Ray
    keeps the group; and trials that wait for room while they hold some would wait for each other.

    Raises:
        LaunchError: it has not room for them, and how to ask for it.
    """
    group = ray.util.get_current_placement_group()
    reserved = [] if group is None else group.bundle_specs[1:]
    if len(reserved) < len(bundles) or any(
        has.get(name, 0) < amount
        for has, wants in zip(reserved, bundles, strict=False)
        for name, amount in wants.items()
    ):
        has = "; ".join(map(_amounts, reserved)) or "nothing"
        raise LaunchError(
            f"the workers of a trial run in what the trial has reserved, and beside itself it has reserved {has}, not "
            f"{len(bundles)} x {_amounts(bundles[0])}: run it as tune.with_resources(trial, "
            f"tune.PlacementGroupFactory([{{'CPU': 1}}] + [{dict(bundles[0])}] * {len(bundles)}))"
        )
    return group


def asked(bundles: Sequence[Mapping[str, float]], strategy: str) -> str:
    """Return the request in words; all bundles are alike."""
    where = {
        "PACK": "on as few nodes as possible",
        "SPREAD": "on as many nodes as possible",
        "STRICT_PACK": "all on one node",
        "STRICT_SPREAD": "each on a node of its own",
    }[strategy]
    return f"{len(bundles)} x {_amounts(bundles[0])}{f', {where} ({strategy})' if len(bundles) > 1 else ' on one node'}"


def present(ray: Any) -> str:
    """Return in words what the nodes have, and what is free in all."""
    nodes = [
        f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]}): {_amounts(node['Resources'])}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return f"It has {'; '.join(nodes) or 'no node'}; free in all: {_amounts(ray.available_resources())}"


def _amounts(resources: Mapping[str, float]) -> str:
    hidden = ("node:", "object_store_memory", "bundle_group", "accelerator_type:")
    shown = {
        name: amount for name, amount in resources.items() if not name.startswith(hidden) and "_group_" not in name
    }
    return ", ".join(f"{name} {_amount(name, shown[name])}" for name in sorted(shown)) or "nothing"


def _amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB" if name == "memory" else f"{amount:g}"
