"""The GEN checks against plugins made on the spot, each in a folder of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made_plugins
import pytest
import torch
import zoo
from made_plugins import Plugin, installed

from torchhal import memory_estimate
from torchhal_conformance import CHECKS, ComponentUnderTest, Result, Session
from torchhal_conformance import _report as reports
from torchhal_conformance._suite import choose

GENERIC = [id for id in CHECKS if id.startswith("GEN")]


@pytest.fixture(autouse=True)
def nothing_stays_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restoration of torch's and torchhal's attributes after a GEN-16 mutant, which patches this process too."""
    monkeypatch.setattr(torch.optim.Optimizer, "step", torch.optim.Optimizer.step)
    monkeypatch.setattr(memory_estimate, "ModelMemory", memory_estimate.ModelMemory)


def run(plugin: Plugin, folder: Path, *ids: str) -> dict[str, Result]:
    with installed(plugin, folder) as component, Session(component) as session:
        return {id: session.run(CHECKS[id]) for id in ids}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "name", "plugin"), made_plugins.MUTANTS, ids=[f"{m[0]} {m[1]}" for m in made_plugins.MUTANTS]
)
def test_mutant_plugin_fails_its_check(id: str, name: str, plugin: Plugin, tmp_path: Path) -> None:
    found = run(plugin, tmp_path, id)[id]
    assert found.outcome == "failed", f"not caught: {found.outcome} {found.reason}"
    # an error that isn't the kit's own must at least come from the plugin
    told = f"{found.reason}\n{found.traceback}"
    assert "Traceback" not in told or "acme" in told, told


@pytest.mark.parametrize(
    ("readme", "outcome"),
    [(made_plugins.README, "passed"), ("<!-- no-run: needs it -->\n```python\nTrainer()\n```\n", "skipped")],
)
def test_readme_example_outcome(readme: str, outcome: str, tmp_path: Path) -> None:
    found = run(replace(made_plugins.WITH_README, readme=readme), tmp_path, "SYS-07")["SYS-07"]
    assert found.outcome == outcome, found.reason


@pytest.mark.parametrize(
    "plugin",
    [made_plugins.SOUND, made_plugins.WITH_SDK, made_plugins.WITH_ENVIRONMENT],
    ids=["sound", "with an SDK", "with an environment"],
)
def test_sound_plugin_passes(plugin: Plugin, tmp_path: Path) -> None:
    found = run(plugin, tmp_path, *GENERIC)
    assert {id: result.reason for id, result in found.items() if result.outcome == "failed"} == {}
    skipped = {id for id, result in found.items() if result.outcome == "skipped"}
    assert skipped == ({"GEN-17"} if plugin.requires != "()" else {"GEN-04", "GEN-05", "GEN-17"})


def test_every_generic_check_has_mutant() -> None:
    # GEN-17 builds wheels: its mutants are in tests/test_conformance.py
    here = {*GENERIC, "SYS-01", "SYS-07"}
    caught = {id for id, _, _ in made_plugins.MUTANTS} | {mutant.id for mutant in zoo.load()}
    assert sorted(here - caught) == ["GEN-17"]


@pytest.mark.parametrize(("name", "outcome"), [("ACME_RANK", "passed"), ("ACME_JOB", "failed")])
def test_table_holds_declared_variable(name: str, outcome: str, tmp_path: Path) -> None:
    """GEN-23 fails where a rank of the launcher's table has none of the variables that are declared."""
    with installed(made_plugins.WITH_ENVIRONMENT, tmp_path):
        tables = ({"ACME_RANK": "0"}, {name: "1"}, {"ACME_RANK": "2"}, {"ACME_RANK": "3"})
        component = ComponentUnderTest("cluster_environment", "acme_run", tables=tables)
        with Session(component) as session:
            found = session.run(CHECKS["GEN-23"])
    assert found.outcome == outcome and (outcome == "passed" or "rank 1" in found.reason), found.reason


@pytest.mark.parametrize(
    ("dependency", "contract"),
    [
        ("torchhal>=0.1,<1", "0.1"),
        ("torchhal>=0.1.3,<1", "0.1"),
        ("torchhal~=0.2", "0.2"),
        ("torchhal>0.1,<1", "0.1"),
        ("torchhal<1", "0.2"),
        ('torchhal>=0.1,<1; extra == "all"', "0.2"),
        ("", "0.2"),
    ],
)
def test_contract_is_the_oldest_release_that_the_distribution_supports(
    dependency: str, contract: str, tmp_path: Path
) -> None:
    with installed(replace(made_plugins.SOUND, dependency=dependency), tmp_path) as component:
        assert component.contract == contract


DRAWS = """
def setup(self, device):
    super().setup(device)
    import torch
    torch.rand(3)
"""


@pytest.mark.parametrize(("dependency", "level"), [("torchhal>=0.1,<1", "provisional"), ("torchhal>=0.2,<1", "core")])
def test_a_check_that_is_newer_than_the_plugin_changes_no_verdict(dependency: str, level: str, tmp_path: Path) -> None:
    plugin = replace(made_plugins.SOUND, dependency=dependency, members=DRAWS)
    with installed(plugin, tmp_path) as component, Session(component) as session:
        report = reports.build(component, [session.run(CHECKS[id]) for id in ("ACC-01", "ACC-31")])
        assert ("ACC-31" in {one.id for one in choose(component, "core", None, "")}) == (level == "core")
    (one,) = [one for one in report["checks"] if one["id"] == "ACC-31"]
    assert (one["outcome"], one["level"], report["contract"]) == ("failed", level, dependency[10:13])
    assert report["verdict"] == ("failed" if level == "core" else "partial")
