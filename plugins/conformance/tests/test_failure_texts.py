"""Test the words of failures: errors without a message or with a huge one, causes, articles and what is left out."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from torchhal.cli import main
from torchhal.cluster import TorchElasticEnvironment
from torchhal.precision import Precision
from torchhal_conformance import CHECKS, ComponentUnderTest, Session
from torchhal_conformance import _report as reports
from torchhal_conformance._component_error import ComponentError
from torchhal_conformance._error_text import with_article
from torchhal_conformance._launcher_env import TABLES
from torchhal_conformance._session import Result


def failure_of(environment: type) -> Result:
    component = ComponentUnderTest.of("cluster_environment", environment, tables=TABLES["torchelastic"])
    with Session(component) as session:
        return session.run(CHECKS["ENV-03"])


class _Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Wordless(TorchElasticEnvironment):
    def global_rank(self) -> int:
        raise _Wordless


class Wordy(TorchElasticEnvironment):
    def global_rank(self) -> int:
        raise OSError("A" * 5_000_000)


def test_a_message_that_is_none_or_huge_is_told_by_its_class() -> None:
    wordless, wordy = (failure_of(part) for part in (Wordless, Wordy))
    assert wordless.outcome == "failed"
    assert "_Wordless: (its __str__ raises RuntimeError)" in wordless.reason
    assert wordy.reason.startswith("OSError: AAAA") and "characters left out)" in wordy.reason
    assert len(json.dumps(wordy.as_dict(), default=str)) < 30_000


def test_one_error_in_worlds_of_several_sizes_has_one_cause() -> None:
    with Session(ComponentUnderTest.of("strategy", "ddp")) as session:
        ids = ("STR-01", "STR-02")
        raised = [ComponentError(f"rank 0 of {size}: TypeError: setup()", "acme.py:3", "") for size in (1, 2)]
        causes = [session._cause(CHECKS[id], one) for id, one in zip(ids, raised, strict=True)]
    assert causes == ["", "STR-01"]


class Unknown(TorchElasticEnvironment):
    """One that the kit has no tables of."""

    name = "unknown"


def test_unequal_nodes_that_were_not_tried_are_told() -> None:
    component = ComponentUnderTest.of("cluster_environment", Unknown, tables=TABLES["torchelastic"])  # of "2+2"
    with Session(component) as session:
        report = reports.build(component, [session.run(CHECKS["ENV-20"])])
    assert reports.summary(report)[-2].startswith("ENV-20 was not made: no unequal nodes of its")


def test_notes_for_those_who_change_the_kit_are_no_contract() -> None:
    assert not [id for id, one in CHECKS.items() if "Changed:" in one.contract + one.why + one.fix]


@pytest.mark.parametrize(("name", "shown"), [("accelerator", "an accelerator"), ("strategy", "a strategy")])
def test_article_fits(name: str, shown: str, capsys) -> None:
    assert with_article(name) == shown
    assert main(["conformance", "run", name, "cpu" if name == "accelerator" else "ddp", "--tables", "x.json"]) == 2
    assert f"not for {shown}" in capsys.readouterr().err


class UsedOnce(Precision):
    """Its context is a generator's, which can be entered once."""

    alias = "used-once"

    @contextlib.contextmanager
    def forward_context(self) -> Any:
        yield


def test_a_context_for_one_use_is_named_as_that() -> None:
    with Session(ComponentUnderTest.of("precision", UsedOnce)) as session:
        result = session.run(CHECKS["PRE-06"])
    assert result.reason.startswith("forward_context() must return one object that can be entered several times")
    assert "_GeneratorContextManager again raised AttributeError" in result.reason and not result.error


def test_failure_that_a_check_injects_is_not_logged(caplog) -> None:
    with Session(ComponentUnderTest.of("accelerator", "cpu")) as session:
        assert session.run(CHECKS["ACC-42"]).outcome == "passed"
    assert caplog.records == []
