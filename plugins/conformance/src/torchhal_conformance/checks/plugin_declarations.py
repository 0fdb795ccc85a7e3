"""GEN: a plugin's metadata announce its components for detection."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchhal_conformance._assertions import require
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._launcher_env import variables
from torchhal_conformance.checks._plugin_facts import discovery_facts, plugin_record, require_loaded


@check("GEN-23", since="0.2")
def declared_variables(context: CheckContext) -> None:
    """The distribution declares a variable for each of its cluster environments, without which detect() is False.

    Every declaration in torchhal.detect and torchhal.auto can be used. Where the launcher's variables are given as a
    table, each rank's hold one that is declared.

    Why: an environment that nothing announces is never asked, and every process of the job trains by itself.
    Fix: [project.entry-points."torchhal.detect"] with VARIABLE = "alias", of a variable that each process has.
    """
    record = plugin_record(context)
    require_loaded(discovery_facts(context))
    require(not record.problems, "; ".join(record.problems))
    outdated = _outdated(context.component.source, record.distribution)
    for entry in record.components:
        if entry.kind != "cluster_environment" or entry.problem:
            continue
        alias = entry.component.alias
        require(
            entry.variables,
            f"no variable announces cluster environment {alias!r}: it is used only when named{outdated}",
        )
        if not entry.availability():
            continue
        with variables(), without(entry.variables):
            found = entry.load().detect()
        names = ", ".join(entry.variables)
        require(found is False, f"detect() of {alias!r} must be False without {names} (got {found!r})")
        if (entry.kind, alias) != (context.component.kind, context.component.alias):
            continue
        for rank, table in enumerate(context.component.own_tables if context.component.tables_are_recorded else ()):
            one = any(table.get(name, "").strip() for name in entry.variables)
            require(
                one, f"rank {rank} of the launcher's table has none of the variables that announce {alias!r}: {names}"
            )


def _outdated(source: Path | None, distribution: str) -> str:
    """Return the cause where the metadata of an editable installation lack what pyproject.toml declares, or ""."""
    if source is None or not (project := source / "pyproject.toml").exists():
        return ""
    declares = '[project.entry-points."torchhal.detect"]' in project.read_text(encoding="utf-8")
    if not declares or importlib.metadata.distribution(distribution).entry_points.select(group="torchhal.detect"):
        return ""
    return f" (pyproject.toml declares variables, the installed metadata none: install {str(source)!r} once more)"


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Remove these variables from os.environ for the block, in which others may change it."""
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
