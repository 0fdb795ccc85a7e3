"""Layouts of simulated jobs, the tables that authors give of them, and environments that no variable describes."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from mutants_cluster_worlds import RUNTIME, FromARuntime

from torchhal.cli import main
from torchhal.errors import ConfigurationError
from torchhal_conformance import CHECKS, ComponentUnderTest, Session, checks_for
from torchhal_conformance import _report as reports
from torchhal_conformance._launcher_env import TABLES, WORLDS
from torchhal_conformance._launcher_worlds import Layout
from torchhal_conformance.checks import plugin_declarations

ROWS = [{"ACME_RANK": str(rank)} for rank in range(4)]


@pytest.mark.parametrize(
    ("text", "nodes", "locals_"),
    [
        ("2+2", [0, 0, 1, 1], [0, 1, 0, 1]),
        ("4", [0, 0, 0, 0], [0, 1, 2, 3]),
        ("1+1+1", [0, 1, 2], [0, 0, 0]),
        ("2+1", [0, 0, 1], [0, 1, 0]),
        ("3+1 cyclic", [0, 1, 0, 0], [0, 0, 1, 2]),
        ("2+2 cyclic", [0, 1, 0, 1], [0, 0, 1, 1]),
    ],
)
def test_places_of_a_layout(text, nodes, locals_) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text
    assert [place.rank for place in layout.places] == list(range(layout.world_size))
    assert [place.node_rank for place in layout.places] == nodes
    assert [place.local_rank for place in layout.places] == locals_


@pytest.mark.parametrize("text", ["", "2+", "0+2", "2x2", "2 + 2", "2+2 block", "2+2 cyclic cyclic", "-1"])
def test_other_layouts_are_refused(text) -> None:
    with pytest.raises(ConfigurationError, match=r"'2\+2', '1\+1\+1', '4' or '3\+1 cyclic'"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"2x2": ROWS}, "'2x2'"),
        ({"2+2": ROWS[:3]}, r"'2\+2' must have 4 rows.*got 3"),
        ({"1+1+1": ROWS[:3]}, r"layout of four ranks.*'1\+1\+1'"),
        ({"2+2": {"ACME_RANK": "0"}}, "list with the variables of each rank"),
    ],
)
def test_tables_of_other_layouts_are_refused(tables, words) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ComponentUnderTest.of("cluster_environment", "slurm", tables=tables)


def test_tables_by_layout_are_beside_those_of_the_kit() -> None:
    given = {"2+2": TABLES["slurm"], "2+2 cyclic": ROWS}
    component = ComponentUnderTest.of("cluster_environment", "slurm", tables=given)
    assert set(component.worlds) == {*WORLDS["slurm"], "2+2 cyclic"}
    assert component.worlds["2+2 cyclic"].tables == tuple(ROWS)
    assert component.world is component.worlds["2+2"]


def test_main_world_has_four_ranks_where_no_node_has_two() -> None:
    world = ComponentUnderTest.of("cluster_environment", "kubeflow").world
    assert world is not None and str(world.layout) == "1+1+1+1"


def test_tables_by_layout_come_from_a_file(tmp_path, capsys) -> None:
    path = tmp_path / "tables.json"
    right = {"2+2": TABLES["slurm"], "1+1+1": WORLDS["slurm"]["1+1+1"].tables}
    wrong = {**right, "1+1+1": WORLDS["slurm"]["2+1"].tables}
    run = ["conformance", "run", "cluster_environment", "slurm", "--check", "ENV-50", "--json", "--tables", str(path)]
    for tables, outcome in ((right, "passed"), (wrong, "failed")):
        path.write_text(json.dumps({"tables": tables}))
        main(run)
        (check,) = json.loads(capsys.readouterr().out)["checks"]
        assert check["outcome"] == outcome, check


def test_variables_of_workers_that_the_environment_starts_are_torchhals() -> None:
    class Owner(FromARuntime):
        name = "owner"
        features = frozenset({"owns_launch"})

    component = ComponentUnderTest.of("cluster_environment", Owner)
    assert set(component.worlds) == {"2+2", "1+1+1", "4"}
    assert {row["TORCHHAL_LAUNCH_KIND"] for row in component.own_tables} == {"owner"}
    assert component.own_launcher == ()


def _run(launcher: tuple[str, ...] | None, *ids: str) -> dict[str, object]:
    component = ComponentUnderTest.of("cluster_environment", FromARuntime, launcher=launcher)
    chosen = [CHECKS[id] for id in ids] or checks_for("cluster_environment")
    with Session(component) as session:
        return reports.build(component, [session.run(one) for one in chosen])


def test_environment_of_a_runtime_needs_a_launcher() -> None:
    report = _run(None, "ENV-01", "ENV-03", "ENV-16", "ENV-53")
    found = {one["id"]: (one["outcome"], one["reason"].partition(":")[0]) for one in report["checks"]}  # type: ignore
    assert found == {
        "ENV-01": ("passed", ""), "ENV-03": ("skipped", "input"), "ENV-16": ("skipped", "input"),
        "ENV-53": ("skipped", "input"),
    }  # fmt: skip
    assert report["verdict"] == "incomplete"


def test_environment_of_a_runtime_needs_no_variables() -> None:
    report = _run(RUNTIME, "ENV-03", "ENV-16")
    assert {one["reason"].partition(":")[0] for one in report["checks"]} == {"not applicable"}  # type: ignore


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="it needs processes made by fork")
def test_environment_of_a_runtime_is_conformant() -> None:
    report = _run(RUNTIME)
    assert [one for one in report["checks"] if one["outcome"] == "failed"] == []  # type: ignore
    assert {one["id"]: one["outcome"] for one in report["checks"]}["ENV-53"] == "passed"  # type: ignore
    assert report["verdict"] == "conformant"


@pytest.mark.parametrize(
    ("project", "installed", "words"),
    [
        ('[project.entry-points."torchhal.detect"]\nACME_TASK = "acme"\n', [], "install .* once more"),
        ('[project.entry-points."torchhal.detect"]\nACME_TASK = "acme"\n', ["ACME_TASK"], "^$"),
        ("[project]\n", [], "^$"),
    ],
)
def test_outdated_metadata_of_an_editable_installation_are_named(project, installed, words, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(project)

    class Installed:
        entry_points = EntryPoints(EntryPoint(name, "acme", "torchhal.detect") for name in installed)

    monkeypatch.setattr(plugin_declarations.importlib.metadata, "distribution", lambda name: Installed)
    assert re.search(words, plugin_declarations._outdated(tmp_path, "torchhal-acme"))
