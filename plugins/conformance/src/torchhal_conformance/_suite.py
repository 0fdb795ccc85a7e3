"""Build a pytest class with one item per check."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchhal import registry
from torchhal.errors import ConfigurationError
from torchhal.plugin import Component
from torchhal_conformance import _report as reports
from torchhal_conformance._check import CHECKS, Check, checks_for
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._error_text import with_article
from torchhal_conformance._session import Result, Session

REPORTS: Final = "TORCHHAL_CONFORMANCE_REPORTS"
"""A variable of the environment: the folder into which each suite of a whole component writes its report."""


def conformance_suite(
    kind: str,
    part: str | Component | type[Any],
    *,
    features: Iterable[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    level: str | None = None,
    only: Iterable[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    accelerator: str = "cpu",
    tables: Sequence[Mapping[str, str]] | Mapping[str, Sequence[Mapping[str, str]]] = (),
    launcher: Sequence[str] | None = None,
    golden: str | os.PathLike[str] | None = None,
    seed: int = 0,
    model: str | Callable[[], Any] | None = None,
    data: str | Callable[[], Any] | None = None,
    read: Callable[[Any], list[dict[str, Any]]] | None = None,
) -> type[Any]:
    """Return a test class with one item per check.

    Assign it in a test module: ``TestMine = conformance_suite("accelerator", "mine")``.

    Args:
        kind: one of :data:`torchhal.plugin.KINDS`.
        part: an alias, a Component, or a class at the top level of its module.
        features: what the component can do beyond the core level; those that its class declares need not be repeated.
        expected_failures: id -> why the component is known to fail it. Strict both ways: one that passes is a failure.
        level: leave out the checks above it.
        only: ids; leave out all other checks, and write no report. For a second alias of one class, say.
        arguments: for the component's constructor.
        accelerator: alias of the accelerator that a precision or strategy is checked on.
        tables: for a cluster environment, the variables that its launcher sets for each rank of two nodes with two
            processes each; or layout -> those of each of its ranks, as in ``{"2+2": [...], "1+1+1": [...]}``. A layout
            gives the processes of each node, and ``"3+1 cyclic"`` deals the ranks to the nodes in turn. One layout has
            four ranks: most checks are made in it.
        launcher: for a cluster environment, the command that starts two processes of what follows it, such as
            ``("srun", "-n", "2")``; torchrun's is known.
        golden: a folder with checkpoints that earlier releases of a checkpoint IO have written; see CIO-25.
        seed: of everything random.
        model: for a strategy that can't train the kit's small net: a function without arguments, or ``"MODULE:NAME"``
            of one, that returns a module with a training_step. Its loss is a mean over samples, and deterministic.
        data: the same for a map-style dataset of that model, whose samples are tuples; the kit's samples are
            6 numbers and 2 targets.
        read: for a logger, ``read(logger)`` returns the rows that its back end has now:
            ``{"step": int | None, "metrics": {name: value}}`` and ``{"params": {name: value}}``. Names may be those of
            the service, and a value that isn't finite may be a text, such as ``"NaN"``. Without it LOG-02 to LOG-05 and
            LOG-11 can't tell whether what was logged is there.

    Raises:
        ConfigurationError: an unknown kind, level, id or feature, an empty reason; a collection error under pytest.
        UnknownAliasError: nobody provides the alias.
    """
    import pytest

    component = ComponentUnderTest.of(
        kind,
        part,
        features=features,
        arguments=arguments,
        accelerator=accelerator,
        tables=tables,
        launcher=launcher,
        golden=golden,
        seed=seed,
        model=model,
        data=data,
        read=read,
    )
    chosen = choose(component, level, only, "'only'")
    expected = dict(expected_failures or {})
    for id, reason in expected.items():
        if id not in {one.id for one in chosen}:
            known = "is no check" if id not in CHECKS else f"is no check of this suite ({kind}, level {level or 'all'})"
            raise ConfigurationError(f"'expected_failures' names {id!r}, which {known}")
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigurationError(f"'expected_failures' must say why {id} fails (got {reason!r})")
    check_features(component)

    def item(id: str) -> Any:
        marks = [pytest.mark.xfail(strict=True, reason=expected[id])] if id in expected else []
        return pytest.param(id, id=id, marks=marks)

    class TestConformance:
        session: Session
        results: list[Result]

        @classmethod
        def setup_class(cls) -> None:
            cls.session, cls.results = Session(component), []

        @classmethod
        def teardown_class(cls) -> None:
            cls.session.close()
            if (folder := os.environ.get(REPORTS)) and cls.results and only is None:
                _write_report(Path(folder), component, reports.build(component, cls.results, expected))

        @pytest.mark.parametrize("id", [item(one.id) for one in chosen])
        def test(self, id: str, request: pytest.FixtureRequest) -> None:
            result = self.session.run(CHECKS[id])
            self.results.append(result)
            if result.outcome == "skipped":
                pytest.skip(result.reason)
            told = result.verbose_text if request.config.get_verbosity() > 0 else result.text
            if (
                result.outcome == "failed"
                and result.check.level_under(component.contract) == "provisional"
                and id not in expected
            ):
                pytest.xfail(f"provisional, which changes no verdict: {told}")
            if result.outcome == "failed":
                pytest.fail(told, pytrace=False)

    TestConformance.__doc__ = f"The conformance checks of the {kind} {component.alias!r}."
    return TestConformance


def choose(component: ComponentUnderTest, level: str | None, only: Iterable[str] | None, name: str) -> list[Check]:
    """Return its checks up to ``level``, of them those in ``only`` if given; ``name`` is for the message.

    Raises:
        ConfigurationError: an unknown level, or an id in ``only`` that is none of them.
    """
    found = checks_for(component.kind, level=level, contract=component.contract)
    if only is None:
        return found
    if isinstance(only, str):
        raise TypeError(f"{name} must be several ids, not one str (got {only!r})")
    wanted = set(only)
    if unknown := sorted(wanted - {one.id for one in found}):
        raise ConfigurationError(
            f"{name} must name checks of this kind and level (got {', '.join(map(repr, unknown))}); "
            f"'torchhal conformance list {component.kind}' shows them"
        )
    return [one for one in found if one.id in wanted]


def _write_report(folder: Path, component: ComponentUnderTest, report: Mapping[str, Any]) -> None:
    on = registry.find("accelerator", component.accelerator).component.alias
    folder.mkdir(parents=True, exist_ok=True)
    (folder / reports.file_name(report, on)).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def check_features(component: ComponentUnderTest) -> None:
    """Raise ConfigurationError for a declared feature that no check of the kind knows."""
    known = {name for one in checks_for(component.kind) for name in one.features}
    if unknown := sorted(component.features - known):
        raise ConfigurationError(
            f"'features' must be of those that the checks of {with_article(component.kind)} know: "
            f"{', '.join(map(repr, sorted(known))) or 'none'} (got {', '.join(map(repr, unknown))})"
        )
