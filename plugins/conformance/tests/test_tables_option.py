"""``torchhal conformance run cluster_environment ALIAS --tables FILE``: the variables of a launcher, from a shell."""

import json

import pytest

from torchhal.cli import main
from torchhal_conformance._launcher_env import TABLES

RUN = ["conformance", "run", "cluster_environment", "slurm", "--check", "ENV-03", "--json"]


def _outcome(capsys: pytest.CaptureFixture[str]) -> str:
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    return str(check["outcome"])


def test_the_tables_in_the_file_are_used(tmp_path, capsys) -> None:
    (tmp_path / "right.json").write_text(json.dumps(TABLES["slurm"]))
    assert main([*RUN, "--tables", str(tmp_path / "right.json")]) == 0
    assert _outcome(capsys) == "passed"
    swapped = [*TABLES["slurm"]]
    swapped[2], swapped[3] = swapped[3], swapped[2]
    (tmp_path / "swapped.json").write_text(json.dumps(swapped))
    assert main([*RUN, "--tables", str(tmp_path / "swapped.json")]) == 1
    assert _outcome(capsys) == "failed"


@pytest.mark.parametrize(
    "content",
    [None, "no JSON", "{}", "[]", json.dumps([{"A": "1"}] * 3), json.dumps([{"A": 1}] * 4), json.dumps(["A"] * 4)],
)
def test_a_file_without_four_tables_is_refused(content, tmp_path, capsys) -> None:
    if content is not None:
        (tmp_path / "tables.json").write_text(content)
    assert main([*RUN, "--tables", str(tmp_path / "tables.json")]) == 2
    assert "'--tables'" in capsys.readouterr().err
