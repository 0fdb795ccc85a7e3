"""Each mutant is caught by the check that is there for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mutants_processes import Swarm
from mutants_strategy import Noisy
from zoo import Mutant, load

from torchhal_conformance import CHECKS, ComponentUnderTest, Session


@pytest.mark.slow
@pytest.mark.parametrize("mutant", load(), ids=str)
def test_mutant_fails_its_check(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", torch.optim.SGD.step)  # one mutant patches it, and pytest puts it back
    component = ComponentUnderTest.of(mutant.kind, mutant.part, **mutant.options)
    with Session(component) as session:
        # who hangs for certain need not do so for long
        hangs = "HANG" in mutant.says
        one = CHECKS[mutant.id]
        result = session.run(replace(one, timeout=6) if hangs else one)
    assert result.outcome == "failed", f"{mutant} was not caught: {result.outcome} {result.reason}"
    # caught by the rule, or by an error that the mutant itself raised: not by an accident on the way there
    told = f"{result.reason}\n{result.traceback}"
    own = any(f"/{name}" in told for name in ("mutants_", "plausible_", "blind_"))
    accident = "Traceback" in told and not own and not mutant.says
    assert not accident and mutant.says in told, told


@pytest.mark.slow
def test_sound_elastic_strategy_passes() -> None:
    """No part of the core is one."""
    with Session(ComponentUnderTest.of("strategy", Swarm)) as session:
        result = session.run(CHECKS["STR-43"])
    assert result.outcome == "passed", result.reason


class LossyAsDeclared(Noisy):
    tolerances = {"weights": 0.05, "losses": 0.05, "gradient_norm": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize("id", ["STR-14", "STR-17", "STR-18", "STR-35", "STR-47"])
def test_sound_lossy_strategy_passes(id: str) -> None:
    with Session(ComponentUnderTest.of("strategy", LossyAsDeclared)) as session:
        result = session.run(CHECKS[id])
    assert result.outcome == "passed", result.reason


def test_every_check_has_mutant() -> None:
    elsewhere = {id for id in CHECKS if id.startswith("GEN")} | {"SYS-01", "SYS-07"}  # test_plugins.py
    assert sorted(set(CHECKS) - elsewhere - {mutant.id for mutant in load()}) == []
