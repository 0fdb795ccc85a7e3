"""Collect the mutants: for each check at least one component that breaks the check's rule alone."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torchhal_conformance.checks  # noqa: F401  registers them
from torchhal_conformance._check import CHECKS

KINDS = {
    "ACC": "accelerator",
    "PRE": "precision",
    "CIO": "checkpoint_io",
    "ENV": "cluster_environment",
    "STR": "strategy",
    "LOG": "logger",
    "CBK": "callback",
}
MODULES = (
    *(f"mutants_{kind}" for kind in KINDS.values()),
    "mutants_checkpoint_storage",
    "mutants_cluster_sizes",
    "mutants_precision_interruptions",
    "mutants_cluster_worlds",
    "blind_accelerators",
    "blind_checkpoint_ios",
    "blind_environments",
    "blind_precisions",
    "blind_strategies",
    "blind_accelerators_2",
    "blind_checkpoint_ios_2",
    "blind_environments_2",
    "blind_precisions_2",
    "blind_strategies_2",
    "blind_accelerators_3",
    "blind_checkpoint_ios_3",
    "blind_environments_3",
    "blind_precisions_3",
    "blind_strategies_3",
    "blind_accelerators_4",
    "blind_checkpoint_ios_4",
    "blind_environments_4",
    "blind_precisions_4",
    "blind_strategies_4",
    "blind_accelerators_5",
    "blind_checkpoint_ios_5",
    "blind_environments_5",
    "blind_precisions_5",
    "blind_strategies_5",
    "blind_accelerators_6",
    "blind_checkpoint_ios_6",
    "blind_environments_6",
    "blind_precisions_6",
    "blind_strategies_6",
    "blind_accelerators_7",
    "blind_checkpoint_ios_7",
    "blind_environments_7",
    "blind_precisions_7",
    "blind_strategies_7",
    "blind_loggers",
    "blind_loggers_2",
    "blind_callbacks",
    "blind_callbacks_2",
    "blind_callbacks_3",
    "mutants_processes",
    "mutants_hooks",
    "mutants_refusals",
    "mutants_sequences",
    "mutants_set_up",
    "plausible_job_defects",
    "plausible_numeric_defects",
    "plausible_strategy_defects",
)


@dataclass(frozen=True)
class Mutant:
    id: str
    kind: str
    part: Any
    options: dict[str, Any] = field(default_factory=dict)
    says: str = ""

    def __str__(self) -> str:
        return f"{self.id}-{getattr(self.part, '__name__', self.part)}"


MUTANTS: list[Mutant] = []


def caught_by(*ids: str, kind: str = "", features: Any = None, says: str = "", **options: Any) -> Any:
    """Put a broken class into the zoo; by default it declares the features that the check needs.

    ``kind``: of the part, for a check that is about several. ``says``: words of the failure, for one that shows as
    another's error.
    """

    def collect(part: Any) -> Any:
        for id in ids:
            own = CHECKS[id].features if features is None else features
            MUTANTS.append(Mutant(id, kind or KINDS[id[:3]], part, {"features": own, **options}, says))
        return part

    return collect


def load() -> list[Mutant]:
    for module in MODULES:
        importlib.import_module(module)
    return MUTANTS
