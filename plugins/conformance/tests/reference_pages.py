"""Generate the pages of docs/reference from docstrings: ``python plugins/conformance/tests/reference_pages.py``.

There is one page per contract: its declarations, its methods, and the checks of its components.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import extension_api
import run_page
import trainer_page
from class_pages import declarations, markdown, methods, private_bases

import torchhal_conformance.checks  # noqa: F401  registers them
from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO, CheckpointLocation
from torchhal.cluster import ClusterEnvironment
from torchhal.launchers import Launcher
from torchhal.plugin import Availability, Candidate, Component, Hookspecs
from torchhal.precision import Precision
from torchhal.strategies import ParallelStrategy, Strategy
from torchhal.trainer.callbacks import Callback
from torchhal.trainer.loggers import Logger
from torchhal_conformance._check import CHECKS, Check

FOLDER = Path(__file__).parents[3] / "docs" / "reference"
MADE = "<!-- made by plugins/conformance/tests/reference_pages.py: change the docstrings, not this page -->"


@dataclass(frozen=True)
class Page:
    file: str
    family: str
    title: str
    classes: tuple[type[Any], ...]
    about: str


PAGES = (
    Page(
        "plugin.md", "GEN", "Plugins", (Hookspecs, Component, Candidate, Availability),
        "What a manifest implements and returns. [Write a plugin](../how-to/write-a-plugin.md) makes one.",
    ),
    Page(
        "accelerator.md", "ACC", "Accelerators", (Accelerator,),
        "`torchhal.accelerators.Accelerator`. [Write an accelerator](../how-to/write-an-accelerator.md) shows one.",
    ),
    Page(
        "precision.md", "PRE", "Precisions", (Precision,),
        "`torchhal.precision.Precision`. [Write a precision](../how-to/write-a-precision.md) shows one.",
    ),
    Page(
        "checkpoint-io.md", "CIO", "Checkpoint IOs", (CheckpointIO, CheckpointLocation),
        "`torchhal.checkpoint.CheckpointIO`. [Write a checkpoint IO](../how-to/write-a-checkpoint-io.md) shows one.",
    ),
    Page(
        "cluster-environment.md", "ENV", "Cluster environments", (ClusterEnvironment,),
        "`torchhal.cluster.ClusterEnvironment`. [Write a cluster environment](../how-to/write-an-environment.md) shows "
        "one.",
    ),
    Page(
        "strategy.md", "STR", "Strategies", (Strategy, ParallelStrategy, Launcher),
        "`torchhal.strategies`. [Write a strategy](../how-to/write-a-strategy.md) and "
        "[Write an engine](../how-to/write-an-engine.md) show one.",
    ),
    Page(
        "logger.md", "LOG", "Loggers", (Logger,),
        "`torchhal.trainer.loggers.Logger`. `torchhal new --kind logger` makes one.",
    ),
    Page(
        "callback.md", "CBK", "Callbacks", (Callback,),
        "`torchhal.trainer.callbacks.Callback`. [Ready-made callbacks](../how-to/callbacks.md) are used by the same "
        "hooks; `torchhal new --kind callback` makes one.",
    ),
    Page(
        "trainer-checks.md", "SYS", "Through the Trainer", (),
        "Checks of components of any kind that train with the component as a user does, by its alias if it has one.",
    ),
)  # fmt: skip


# -- checks --------------------------------------------------------------------------------------------------


def of_family(family: str) -> list[Check]:
    return [one for one in CHECKS.values() if one.id.startswith(family)]


def checks(family: str) -> Iterator[str]:
    for one in of_family(family):
        notes = [one.level]
        if one.features:
            notes = [f"feature {', '.join(f'`{name}`' for name in sorted(one.features))}"]
        if one.world_sizes:
            notes.append(
                f"in {' and '.join(map(str, one.world_sizes))} process{'es' if max(one.world_sizes) > 1 else ''}"
            )
        yield f"### {one.id}\n"
        yield f"{one.contract}\n"
        yield f"- level: {', '.join(notes)}; since {one.since}\n- why: {one.why}\n- fix: {one.fix}\n"


def text(page: Page) -> str:
    parts = [f"# {page.title}\n", f"{MADE}\n", f"{page.about}\n"]
    for cls in page.classes:
        parts.append(f"## {cls.__name__}\n")
        parts.append(f"{markdown(cls.__doc__ or '')}\n")
        parts_of_class = [cls, *private_bases(cls)]
        if declared := [text for base in parts_of_class for text in declarations(base)]:
            parts += ["Declarations:\n", *declared, ""]
        for base in parts_of_class:
            parts += methods(base)
    parts += ["## Checks\n", "See [the conformance kit](conformance.md) for how they are made.\n", *checks(page.family)]
    return "\n".join(parts).rstrip() + "\n"


def index() -> str:
    """Return the table in conformance.md that links the pages."""
    rows = ["| checks | of | how many | features |", "|---|---|---|---|"]
    for page in PAGES:
        found = of_family(page.family)
        features = ", ".join(sorted({f"`{name}`" for one in found for name in one.features})) or "none"
        rows.append(
            f"| {page.family} | [{page.title[0].lower()}{page.title[1:]}]({page.file}) | {len(found)} | {features} |"
        )
    return "\n".join(rows) + "\n"


START, END = "<!-- checks: made by plugins/conformance/tests/reference_pages.py -->\n", "<!-- end of checks -->\n"
KIT = FOLDER / "conformance.md"


def pages() -> dict[Path, str]:
    before, rest = KIT.read_text(encoding="utf-8").split(START)
    kit = f"{before}{START}\n{index()}\n{END}{rest.split(END)[1]}"
    others = {
        FOLDER / "extension-api.md": extension_api.text(MADE),
        FOLDER / "trainer.md": trainer_page.text(MADE),
        FOLDER / "run.md": run_page.text(MADE),
    }
    return {KIT: kit, **{FOLDER / page.file: text(page) for page in PAGES}, **others}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
