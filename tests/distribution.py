"""Order a session's tests so that each worker of pytest-xdist begins with costly files and ends with cheap ones.

``worksteal`` gives each worker an equal number of tests in their order, and a worker that is done takes over the end of
another's. Costly tests mostly wait, for a cluster or for another process: all at once at the end, they leave the cores
idle before they begin and keep everybody waiting for the last one.

A session that ends early (:mod:`time_budget`) leaves out what comes last. ``TESTS_TURN``, a number that differs from
session to session, decides with which of the cheap tests the first share begins; if it is odd, costly files come last.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

TURN: Final = "TESTS_TURN"
FAST: Final = {
    "tests/test_every_alias.py": 203, "core/tests/test_launchers_failures.py": 75,
    "plugins/parallel/tests/test_parity.py": 75, "plugins/simulator/tests/test_faults.py": 58,
    "tests/test_template.py": 52, "core/tests/test_hangs.py": 50, "plugins/parallel/tests/test_parameters.py": 15,
    "plugins/deepspeed/tests/test_parity.py": 47, "tests/test_clusters.py": 40,
}  # fmt: skip
SLOW: Final = {
    "tests/test_clusters.py": 1000, "tests/test_cluster_failures.py": 540, "core/tests/test_stops_at_the_start.py": 450,
    "plugins/ray/tests/test_cluster_of_ray.py": 420, "tests/test_docs.py": 470, "core/tests/test_trainer_ddp.py": 250,
    "plugins/parallel/tests/test_parity.py": 310, "plugins/parallel/tests/test_checkpoints.py": 265,
    "plugins/simulator/tests/test_operators.py": 230, "tests/test_elastic.py": 220, "tests/test_template.py": 160,
    "plugins/hpu/tests/test_conformance.py": 160, "tests/test_packaging.py": 150, "tests/test_write_a_plugin.py": 125,
    "plugins/hivemind/tests/test_peers.py": 125, "plugins/ray/tests/test_tune.py": 120,
    "plugins/ray/tests/test_hosts_of_ray.py": 110, "tests/test_deepspeed.py": 110,
    "plugins/hivemind/tests/test_alone.py": 100, "core/tests/test_standard_streams.py": 100,
    "core/tests/test_launchers_failures.py": 90, "plugins/deepspeed/tests/test_engine_runs.py": 85,
    "plugins/simulator/tests/test_faults.py": 80, "plugins/deepspeed/tests/test_engine_checkpoints.py": 75,
    "tests/test_docs_site.py": 85, "plugins/parallel/tests/test_odd_models.py": 70,
    "plugins/parallel/tests/test_launch.py": 70,
    "plugins/bagua/tests/test_conformance.py": 55, "core/tests/test_meeting_ranks.py": 55,
    "core/tests/test_trainer_ddp_failures.py": 130, "tests/test_configure.py": 90, "core/tests/test_trainer_cli.py": 70,
}  # fmt: skip
"""Seconds of one worker in the files of few and costly tests, as the end of a session lists them; about is enough."""


def order(items: list[pytest.Item]) -> None:
    """Put costly files at the beginnings of the workers' shares; in a session without workers, nothing happens."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if not workers:
        return
    files: dict[str, list[pytest.Item]] = {}
    costs: dict[str, float] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        files.setdefault(file, []).append(item)
        tier = SLOW if item.get_closest_marker("slow") else FAST
        costs[file] = max(costs.get(file, 0), tier.get(file, 0))
    turn = int(os.environ.get(TURN) or 0)
    costly = sorted((file for file in files if costs[file]), key=lambda file: -costs[file])
    firsts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for file in costly:
        least = loads.index(min(loads))
        firsts[least] += files[file]
        loads[least] += costs[file]
    rest = [item for file in files if not costs[file] for item in files[file]]
    begin = turn % len(rest) if rest else 0
    rest = rest[begin:] + rest[:begin]
    left = len(items)
    items.clear()
    for index, first in enumerate(firsts):
        share = left // (workers - index)  # as worksteal divides them
        left -= share
        room = max(0, share - len(first))
        items += [*rest[:room], *first] if turn % 2 else [*first, *rest[:room]]
        del rest[:room]
    items += rest
