"""The tool that mutates the core's components: its changes, its copies, its verdicts and its table."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from mutation import report
from mutation.__main__ import existing_mutants, main
from mutation.instrument import instrument
from mutation.operators import OPERATORS, Mutant, mutants_of
from mutation.reference import KINDS, read_sources, write_package
from mutation.runner import Control, Runner, Verdict


def changes(body: str, parameters: str = "self, a, b") -> dict[str, set[str]]:
    """Return the mutants of a function with this body: operator -> texts of the whole body."""
    source = f"def f({parameters}):\n    {body}\n"
    found: dict[str, set[str]] = {}
    for one in mutants_of(source, "x.py"):
        text = one.apply(source).partition("\n")[2].strip()
        ast.parse(one.apply(source))
        found.setdefault(one.operator, set()).add(text)
    return found


@pytest.mark.parametrize(
    ("operator", "body", "texts"),
    [
        ("arithmetic", "g(a + b)", {"g((a - b))"}),
        ("boolean", "g(a and b)", {"g((a or b))"}),
        ("compare", "g(a < b)", {"g((a <= b))"}),
        ("compare", "g(a is None)", {"g((a is not None))"}),
        ("constant", "g(1)", {"g(2)", "g((0))"}),
        ("constant", "g(True)", {"g(False)"}),
        ("delete", "self.x = a", {"pass"}),
        ("delete", "raise ValueError(1 + 1)", {"pass"}),
        ("dtype", "g(torch.float32)", {"g(torch.float64)"}),
        ("dtype", "g(a[0].float())", {"g((a[0]).double())"}),
        ("drop_argument", "g(a, key=b)", {"g(a)"}),
        ("negate", "g(1 if a else 2)", {"g(1 if (not (a)) else 2)"}),
        ("negate", "g([x for x in a if not x])", {"g([x for x in a if (x)])"}),
        ("no_context", "with a: g()", {'with __import__("contextlib").nullcontext(): g()'}),
        ("rank", "g(self.rank)", {"g((self.rank + 1))"}),
        ("rank", "g(self.world_size())", {"g((self.world_size() + 1))"}),
        ("return_input", "return b", {"return a"}),
        ("return_none", "return b", {"return None"}),
        ("strip_call", "g(a.clone())", {"g((a))"}),
        ("strip_call", "g(list(a))", {"g((a))"}),
        ("swap_arguments", "g(a, b)", {"g(b, a)"}),
        ("swallow", "try: g()\n    except E: raise", {"try: g()\n    except E: pass"}),
        ("uncaught", "try: g()\n    except E: raise", {"try: g()\n    except (): raise"}),
    ],
)
def test_operator_makes_its_changes(operator: str, body: str, texts: set[str]) -> None:
    assert changes(body)[operator] == texts


def test_every_operator_is_used() -> None:
    found = {one.operator for kind in KINDS for one in existing_mutants(kind)}
    assert found == set(OPERATORS)


@pytest.mark.parametrize(
    "body",
    ['raise ValueError(f"{a + 1} is {b}")', "assert a is not None", "_log.warning(a, b)", "x: list[1] = a", "import a"],
)
def test_wording_and_types_are_left_alone(body: str) -> None:
    assert set(changes(body)) <= {"delete"}
    assert not changes(body).get("delete", set()) - {"pass"}


def test_id_stays_when_lines_move() -> None:
    source = "def f(a):\n    return g(a + 1)\n"
    moved = "import os\n\n\ndef h():\n    pass\n\n\n" + source
    ids = [one.id for one in mutants_of(source, "x.py")]
    assert ids == [one.id for one in mutants_of(moved, "x.py") if one.function == "f"]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_import_each_other_and_the_cores_errors(kind: str, tmp_path: Path) -> None:
    sources = read_sources(kind)
    write_package(tmp_path, kind, sources)
    copied = {file.removesuffix(".py").replace("/", ".") for file in sources}
    for file in sources:
        for node in ast.walk(ast.parse((tmp_path / "mutated" / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchhal."):
                names = {alias.name for alias in node.names}
                own = node.module.removeprefix("torchhal.") in copied
                assert not own or all(name.endswith(("Error", "Accelerator", "SupportsLaunch")) for name in names), file
            if isinstance(node, ast.ClassDef):
                assert not any(ast.unparse(base).endswith(("Error", "Protocol")) for base in node.bases)


def test_statements_of_functions_are_counted() -> None:
    source = 'import os\n\n\ndef f(a):\n    """Doc."""\n    if a:\n        return 1\n    return 2\n\n\nX = 1\n'
    copies, statements = instrument({"x.py": source})
    assert [(line, column) for _, line, column in sorted(statements)] == [(6, 4), (7, 8), (8, 4)]
    reached: list[int] = []
    text = copies["x.py"].replace("from mutated._reach import reach as _mutation_reach", "")
    scope = {"_mutation_reach": reached.append}
    exec(text, scope)
    assert scope["f"](1) == 1
    assert {statements[number][1] for number in reached} == {6, 7}
    assert scope["f"].__doc__ == "Doc."


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with Runner("accelerator", cache=tmp_path_factory.mktemp("cache")) as runner:
        yield runner


@pytest.fixture(scope="module")
def control(runner: Runner) -> Control:
    return runner.control(["cpu"], only={"ACC-06", "ACC-10", "ACC-21"})


def one_of(function: str, operator: str, text: str) -> Mutant:
    (found,) = (
        one
        for one in existing_mutants("accelerator")
        if (one.function, one.operator, one.text) == (function, operator, text)
    )
    return found


def test_obvious_mutant_is_killed_and_obvious_survivor_survives(runner: Runner, control: Control) -> None:
    assert not control.failed and control.seconds["cpu"].keys() == {"ACC-06", "ACC-10", "ACC-21"}
    killed = one_of("CPUAccelerator.auto_device_count", "constant", "(0)")
    harmless = one_of("CPUAccelerator", "constant", "1")  # auto_priority
    unreached = one_of("CPUAccelerator.device_count", "constant", "2")
    verdicts = runner.run([killed, harmless, unreached], control)
    assert (verdicts[killed.id].outcome, verdicts[killed.id].check) == ("killed", "ACC-06")
    assert verdicts[harmless.id].outcome == "survived" and verdicts[harmless.id].reached == 3
    assert verdicts[unreached.id].outcome == "survived" and verdicts[unreached.id].reached == 0


def test_results_are_kept_by_source_and_mutant(runner: Runner, control: Control, monkeypatch) -> None:
    mutant = one_of("CPUAccelerator.auto_device_count", "return_none", "None")
    first = runner.run([mutant], control)[mutant.id]
    assert first.outcome == "killed"
    monkeypatch.setattr(runner, "_try", lambda *arguments: pytest.fail("it was run again"))
    assert runner.run([mutant], control)[mutant.id] == first
    monkeypatch.setitem(runner.sources, "accelerators/_devices.py", "# another source\n")
    with pytest.raises(pytest.fail.Exception, match="run again"):
        runner.run([mutant], control)


# -- the table -----------------------------------------------------------------------------------------------


def test_rows_of_the_table_match_mutants() -> None:
    ids = [one.id for kind in KINDS for one in existing_mutants(kind)]
    rows = report.load()
    assert [row.mutants for row in rows if not any(fnmatchcase(id, row.mutants) for id in ids)] == []
    assert len({row.mutants for row in rows}) == len(rows)


def test_table_is_compared_with_verdicts() -> None:
    mutants = mutants_of("def f(a):\n    self.x = a\n    return g(a)\n", "x.py")
    ids = [one.id for one in mutants]
    table = [
        report.Explanation(ids[0], "equivalent", "It is."),
        report.Explanation("x.py:f:return*", "outside", "It is."),
        report.Explanation("x.py:h:*", "outside", "It was."),
        report.Explanation("y.py:h:*", "outside", "Another kind's."),
    ]
    verdicts = {id: Verdict("killed", check="ACC-01") for id in ids}
    told = report.stale(table, mutants, verdicts)
    assert told == [
        f"{ids[0]}: killed by ACC-01 now; remove the row",
        "x.py:h:*: no such mutant any more; remove the row",
    ]
    verdicts = {id: Verdict("survived") for id in ids}
    last = report.summary(mutants, verdicts, table).splitlines()[-1].split()
    assert last == ["all", "3", "0", "0", "1", "0", "2", "0", "0", "0", "%", "-"]
    assert report.explain(mutants[-1], table).reason == "outside"


@pytest.mark.parametrize(
    "row",
    [
        {"mutants": "a", "reason": "luck", "why": "It is."},
        {"mutants": "a", "reason": "hole", "why": "It is."},
        {"mutants": "a", "reason": "outside", "why": "no sentence"},
    ],
)
def test_table_refuses_incomplete_rows(row: dict, tmp_path: Path) -> None:
    import json

    (tmp_path / "table").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match="a: a reason of"):
        report.load(tmp_path / "table")


def test_command_lists_a_sample(capsys) -> None:
    assert main(["--kind", "accelerator", "--sample", "1", "5", "--list"]) == 0
    first = capsys.readouterr().out.splitlines()
    assert len(first) == 5 and all(":" in line and " -> " in line for line in first)
    main(["--kind", "accelerator", "--sample", "1", "5", "--list"])
    assert capsys.readouterr().out.splitlines() == first
