"""Run the checks of one mutant until the first one that fails: ``python run_checks.py SPECIFICATION``, in a fork.

Each result is a line of JSON, written at once, so that those before a hang are known.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from torchhal import registry
from torchhal.plugin import Component
from torchhal_conformance import CHECKS, ComponentUnderTest, Session, _session

sys.path.append(str(Path(__file__).resolve().parents[1]))
from mutation.instrument import select_row


def main(specification: str) -> None:
    given = json.loads(Path(specification).read_text(encoding="utf-8"))
    vars(_session)["TIMEOUT_HERE"] = given["patience"]
    with open(given["output"], "w", encoding="utf-8") as output:
        for carrier in given["carriers"]:
            if not _run(carrier, given, output):
                return


def _run(carrier: dict[str, Any], given: dict[str, Any], output: TextIO) -> bool:
    """Run the carrier's checks, and return whether to go on."""

    def tell(check: str, outcome: str, reason: str, seconds: float) -> bool:
        line = {"carrier": carrier["name"], "check": check, "outcome": outcome, "reason": reason, "seconds": seconds}
        print(json.dumps(line), file=output, flush=True)
        return given["all"] or outcome != "failed"

    try:
        target = Component(carrier["alias"], carrier["target"], defaults=carrier["defaults"])
        component = ComponentUnderTest.of(given["kind"], target, **carrier["options"])
        own = component.cls
    except Exception:
        return tell("load", "failed", traceback.format_exc(), 0.0)
    if given["kind"] == "cluster_environment":  # of two with one priority both would be detected: ENV-12
        registry.find(given["kind"], component.alias)._class[:] = [own]
    with Session(component) as session:
        for id, timeout, row in carrier["checks"]:
            if given["reach"]:
                select_row(given["reach"], row)
            one = CHECKS[id] if timeout is None else replace(CHECKS[id], timeout=min(timeout, CHECKS[id].timeout))
            result = session.run(one)
            if not tell(id, result.outcome, f"{result.reason}\n{result.traceback}".rstrip(), result.seconds):
                return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
