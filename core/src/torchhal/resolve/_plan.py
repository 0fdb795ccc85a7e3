"""Hold the request and the plan: plain data, before and after the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchhal._text_table import format_table
from torchhal.accelerators import Accelerator
from torchhal.precision import Precision
from torchhal.strategies import Strategy


@dataclass(frozen=True)
class Request:
    """The Trainer's hardware arguments as the user wrote them.

    Components are aliases, aliases with options ``{alias: {option: value}}``, classes or instances.
    """

    accelerator: str | Mapping[str, Any] | Accelerator | type[Accelerator] = "auto"
    strategy: str | Mapping[str, Any] | Strategy | type[Strategy] = "auto"
    devices: int | str | Sequence[int] = "auto"
    num_nodes: int | str = 1
    precision: str | int | Mapping[str, Any] | Precision | type[Precision] | None = None
    plugins: Any = ()

    @property
    def is_auto_strategy(self) -> bool:
        """Whether the choice of a strategy is left to torchhal."""
        return isinstance(self.strategy, str) and self.strategy.strip().lower() == "auto"


@dataclass(frozen=True)
class ResolvedComponent:
    """One chosen component: its alias where it has one, the instance, and why it was chosen."""

    kind: str
    alias: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Plan:
    """The choices for a run, and for each the reason. Nothing has been started."""

    accelerator: ResolvedComponent
    precision: ResolvedComponent
    checkpoint_io: ResolvedComponent
    cluster_environment: ResolvedComponent | None
    strategy: ResolvedComponent
    device_indices: tuple[int, ...]
    devices: tuple[torch.device, ...]
    devices_reason: str
    num_nodes: int | None
    """None: "auto", determined when the ranks have met."""
    world_size: int
    launcher: str
    launcher_reason: str
    left_to_launcher: frozenset[str] = field(default=frozenset())
    """``devices`` or ``num_nodes``, where they are "auto" and determined when the ranks have met."""
    notes: tuple[str, ...] = field(default=())
    """Messages to show the user once, such as an "auto" that fell back."""

    def build(self) -> Strategy:
        """Return the strategy, configured with its components."""
        strategy: Strategy = self.strategy.value
        strategy.configure(
            accelerator=self.accelerator.value,
            precision=self.precision.value,
            checkpoint_io=self.checkpoint_io.value,
            cluster_environment=None if self.cluster_environment is None else self.cluster_environment.value,
            devices=self.devices,
            num_nodes=self.num_nodes or 1,
        )
        strategy.left_to_launcher = self.left_to_launcher
        return strategy

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (what, choice, reason), in reading order."""
        parts = [self.accelerator, self.strategy, self.precision, self.checkpoint_io]
        rows = [(part.kind, part.alias, part.reason) for part in parts]
        rows.insert(1, ("devices", ", ".join(map(str, self.devices)), self.devices_reason))
        if self.cluster_environment is not None:
            rows.append(("cluster_environment", self.cluster_environment.alias, self.cluster_environment.reason))
        nodes = "nodes are counted when the ranks meet" if self.num_nodes is None else f"{self.num_nodes} node(s)"
        rows.append(("world_size", str(self.world_size), nodes))
        rows.append(("launcher", self.launcher, self.launcher_reason))
        return rows

    def describe(self) -> str:
        """Return the plan as text, one line per choice."""
        lines = format_table(self.rows(), align="<<<")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for ``torchhal explain --json``."""
        rows = {what: {"choice": choice, "reason": reason} for what, choice, reason in self.rows()}
        return {"schema": 1, **rows, "notes": list(self.notes)}
