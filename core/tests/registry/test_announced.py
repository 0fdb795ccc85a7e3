"""Test what metadata announce: cluster environments by a variable, accelerators by a module, without other imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

import torchhal.registry
from torchhal.errors import ConfigurationError, PluginError
from torchhal.registry import Registry
from torchhal.registry._declarations import read_declarations
from torchhal.registry._manifest_source import may_implement
from torchhal.resolve import Request, resolve

ENVIRONMENTS = """
@hookimpl
def torchhal_cluster_environments():
    return [Component(alias, target) for alias, target in ({pairs},)]
"""
CLASSES = """
from torchhal.cluster import LocalEnvironment

class Started(LocalEnvironment):
    name = "acme"
    priority = 95
    @classmethod
    def detect(cls):
        return True

class Same(Started):
    name = "zeta"

class Waiting(Started):
    name = "waiting"
    @classmethod
    def detect(cls):
        return False

class Failing(Started):
    name = "failing"
    @classmethod
    def detect(cls):
        raise OSError("no daemon")
"""


def add(site: Any, name: str, detect: str, *pairs: tuple[str, str], **more: Any) -> None:
    """Add a distribution with cluster environments and the lines ``detect`` in its group torchhal.detect."""
    stem = name.replace("-", "_")
    if not (site.folder / "acme_environments.py").exists():
        (site.folder / "acme_environments.py").write_text(CLASSES)
    entry_points = f"[torchhal]\n{stem} = {stem}_manifest\n\n[torchhal.detect]\n{detect}\n"
    targets = [(alias, f"acme_environments:{cls}") for alias, cls in pairs]
    manifest = more.pop("manifest", ENVIRONMENTS.format(pairs=", ".join(map(repr, targets))))
    site.add(name, manifest, entry_points=entry_points, **more)


@pytest.fixture
def in_place(site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a registry of the site's distributions in the place of the process's own."""
    for name in ("ACME_RANK", "ACME_JOB", "ZETA_RANK", "TORCHHAL_CLUSTER", "TORCHHAL_LAUNCH_ID"):
        monkeypatch.delenv(name, raising=False)

    def put(**environ: str) -> Registry:
        registry = site.registry(**environ)
        monkeypatch.setattr(torchhal.registry, "_default", registry)
        return registry

    yield put
    for module in ("acme_environments",):
        sys.modules.pop(module, None)


def imported() -> set[str]:
    return {name.removesuffix("_manifest") for name in sys.modules if name.endswith("_manifest")}


def environment() -> Any:
    return resolve(Request(accelerator="cpu", strategy="ddp"))


def test_unset_variable_imports_nothing(site: Any, in_place: Any) -> None:
    add(site, "acme", "ACME_RANK = acme", ("acme", "Started"))
    in_place()
    plan = environment()
    assert (plan.cluster_environment.alias, plan.notes) == ("local", ()) and imported() == set()


@pytest.mark.parametrize("detect", ["ACME_RANK = acme", "ACME_JOB=acme\n# a comment\n  ACME_RANK  =  acme  "])
def test_set_variable_asks_its_environment(site: Any, in_place: Any, monkeypatch: Any, detect: str) -> None:
    """Only the manifest of the distribution that declares the variable is imported."""
    add(site, "acme", detect, ("acme", "Started"))
    add(site, "zeta", "ZETA_RANK = zeta", ("zeta", "Same"))
    site.add("board", site.accelerator("board"))
    monkeypatch.setenv("ACME_RANK", "0")
    in_place()
    chosen = environment().cluster_environment
    assert (chosen.alias, chosen.reason) == ("acme", "detected from the environment")
    assert type(chosen.value).__name__ == "Started" and imported() == {"acme"}


def test_empty_variable_is_unset(site: Any, in_place: Any, monkeypatch: Any) -> None:
    add(site, "acme", "ACME_RANK = acme", ("acme", "Started"))
    monkeypatch.setenv("ACME_RANK", " ")
    in_place()
    assert environment().cluster_environment.alias == "local" and imported() == set()


def test_only_the_declared_environment_is_asked(site: Any, in_place: Any, monkeypatch: Any) -> None:
    """Another environment of the same distribution, declared for another variable or none, is not asked."""
    pairs = ("acme", "Waiting"), ("other", "Started"), ("third", "Failing")
    add(site, "acme", "ACME_RANK = acme\nZETA_RANK = third", *pairs)
    monkeypatch.setenv("ACME_RANK", "0")
    in_place()
    plan = environment()
    assert plan.cluster_environment.alias == "local" and plan.notes == ()


def test_undeclared_environment_is_used_when_named(site: Any, in_place: Any, monkeypatch: Any) -> None:
    add(site, "acme", "", ("acme", "Started"))
    in_place()
    assert environment().cluster_environment.alias == "local"
    assert resolve(Request(accelerator="cpu", plugins="acme")).cluster_environment.alias == "acme"
    monkeypatch.setenv("TORCHHAL_CLUSTER", "acme")
    assert environment().cluster_environment.alias == "acme"


def test_tie_is_refused(site: Any, in_place: Any, monkeypatch: Any) -> None:
    for name, cls in (("acme", "Started"), ("zeta", "Same")):
        add(site, name, f"ACME_RANK = {name}", (name, cls))
    monkeypatch.setenv("ACME_RANK", "0")
    in_place()
    with pytest.raises(ConfigurationError, match="'acme/acme', 'zeta/zeta'"):
        environment()


def test_failing_detect_is_a_note(site: Any, in_place: Any, monkeypatch: Any) -> None:
    add(site, "acme", "ACME_RANK = acme", ("acme", "Failing"))
    monkeypatch.setenv("ACME_RANK", "0")
    in_place()
    (note,) = environment().notes
    assert "cluster environment 'acme/acme' could not say whether it started this process: no daemon" in note


@pytest.mark.parametrize(
    ("environ", "requires", "note"),
    [
        ({"TORCHHAL_DISABLE_PLUGINS": "acme"}, "torchhal>=0.0.1", ""),
        ({"TORCHHAL_PLUGINS": ""}, "torchhal>=0.0.1", ""),
        ({}, "torchhal>=99", "ACME_RANK is set, .* is incompatible: it requires torchhal>=99"),
    ],
    ids=["denied", "not allowed", "incompatible"],
)
def test_excluded_plugin_is_not_asked(
    site: Any, in_place: Any, monkeypatch: Any, environ: dict[str, str], requires: str, note: str
) -> None:
    add(site, "acme", "ACME_RANK = acme", ("acme", "Started"), requires=(requires,))
    monkeypatch.setenv("ACME_RANK", "0")
    in_place(**environ)
    plan = environment()
    assert plan.cluster_environment.alias == "local" and imported() == set()
    assert pytest.approx(len(plan.notes)) == bool(note)
    if note:
        import re

        assert re.search(note, plan.notes[0])


def test_broken_manifest_is_a_note_and_imported_once(site: Any, in_place: Any, monkeypatch: Any) -> None:
    source = "import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\nraise OSError('no licence')"
    add(site, "acme", "ACME_RANK = acme", manifest=source)
    monkeypatch.setenv("ACME_RANK", "0")
    registry = in_place()
    for _ in range(2):
        (note,) = environment().notes
        assert "ACME_RANK is set" in note and "OSError: no licence" in note
    (record,) = registry.plugins()
    assert record.status == "broken"
    import builtins

    times = vars(builtins).pop("times")
    assert times == 1
    registry = in_place(TORCHHAL_STRICT_PLUGINS="1")
    with pytest.raises(PluginError, match="no licence"):
        environment()
    vars(builtins).pop("times")


def test_refresh_reads_metadata_again(site: Any, in_place: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACME_RANK", "0")
    registry = in_place()
    assert environment().cluster_environment.alias == "local"
    add(site, "acme", "ACME_RANK = acme", ("acme", "Started"))
    assert environment().cluster_environment.alias == "local"  # one look per process
    registry.refresh()
    assert environment().cluster_environment.alias == "acme"


# -- metadata that can't be used -----------------------------------------------------------------------------


WRONG = {
    "no variable": ("ACME-RANK = acme", "'ACME-RANK' is no name of an environment variable"),
    "no alias": ("ACME_JOB = acme:Started", "the value must be an alias"),
    "upper case": ("ACME_JOB = Acme", "the value must be an alias"),
    "no value": ("ACME_JOB", "the value must be an alias"),
    "unknown alias": ("ACME_JOB = other", "the distribution has no cluster environment 'other'"),
}


@pytest.mark.parametrize(("line", "reason"), WRONG.values(), ids=WRONG)
def test_wrong_declaration_costs_only_itself(
    site: Any, in_place: Any, monkeypatch: Any, line: str, reason: str
) -> None:
    """The other declarations of the distribution hold, and the record names the wrong one."""
    add(site, "acme", f"{line}\nACME_RANK = acme", ("acme", "Started"))
    monkeypatch.setenv("ACME_RANK", "0")
    registry = in_place()
    assert environment().cluster_environment.alias == "acme"
    (record,) = registry.plugins()
    assert record.status == "loaded"
    (problem,) = record.problems
    assert reason in problem and line.split()[0] in problem
    assert record.to_dict()["problems"] == [problem]
    if "unknown" not in reason and "has no" not in reason:
        assert site.registry().installed()[0].problems == (problem,)


def test_unknown_alias_that_is_announced_is_a_note(site: Any, in_place: Any, monkeypatch: Any) -> None:
    add(site, "acme", "ACME_RANK = other", ("acme", "Started"))
    monkeypatch.setenv("ACME_RANK", "0")
    in_place()
    (note,) = environment().notes
    assert "has no cluster environment 'other' that can be used (it has 'acme')" in note


@pytest.mark.parametrize("content", [b"[torchhal.detect]\nACME_RANK = \xff\n", b"[torchhal]\nx = y\n\xff"])
def test_unreadable_entry_points(site: Any, in_place: Any, monkeypatch: Any, content: bytes) -> None:
    site.add("other-thing", entry_points=content)
    add(site, "acme", "ACME_RANK = acme", ("acme", "Started"))
    monkeypatch.setenv("ACME_RANK", "0")
    registry = in_place()
    plan = environment()
    assert plan.cluster_environment.alias == "acme" and plan.notes == ()
    broken, loaded = sorted(registry.plugins(), key=lambda record: record.status)
    assert "its entry_points.txt can't be read" in broken.reason and loaded.distribution == "acme"


def test_declaration_without_plugin(site: Any, in_place: Any, monkeypatch: Any) -> None:
    site.add("acme", entry_points="[torchhal.detect]\nACME_RANK = acme\n")
    monkeypatch.setenv("ACME_RANK", "0")
    registry = in_place()
    (note,) = environment().notes
    assert "has [torchhal.detect], but no plugin in [torchhal]" in note
    (record,) = registry.plugins()
    assert record.status == "broken"


def test_dash_is_written_as_underscore(site: Any, in_place: Any, monkeypatch: Any) -> None:
    """setuptools refuses a dash in a value."""
    add(site, "acme", "ACME_RANK = my_acme", ("my-acme", "Started"))
    monkeypatch.setenv("ACME_RANK", "0")
    registry = in_place()
    assert environment().cluster_environment.alias == "my-acme"
    assert registry.find("cluster_environment", "my-acme").variables == ("ACME_RANK",)
    assert registry.plugins()[0].problems == ()


def test_names_keep_their_case() -> None:
    assert read_declarations("[torchhal.detect]\nAcme_Rank = acme\n").variables == (("Acme_Rank", "acme"),)


# -- the index of installed distributions --------------------------------------------------------------------


def test_index_agrees_with_importlib(site: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Of several distributions of one name the first with metadata counts; what pip left behind doesn't."""
    other = type(site)(tmp_path / "other")
    monkeypatch.syspath_prepend(other.folder)
    add(other, "acme", "", ("acme", "Started"), version="2.0")  # before site's on sys.path
    add(site, "acme", "ACME_RANK = acme", ("acme", "Started"))
    other.add("zeta", entry_points="", metadata="")  # uninstalled, the folder stayed
    add(site, "zeta", "ZETA_RANK = zeta", ("zeta", "Same"))
    add(site, "left", "ACME_RANK = left", ("left", "Started"), info="~eft-1.0.dist-info")
    egg = site.add("Old.Egg", site.accelerator("egg"), info="Old.Egg.egg-info")
    (egg / "METADATA").rename(egg / "PKG-INFO")
    monkeypatch.setenv("ACME_RANK", "0")
    monkeypatch.setenv("ZETA_RANK", "0")
    fast = Registry(environ={})
    slow = Registry(distributions=importlib_metadata.distributions, environ={})
    for registry in (fast, slow):
        entries, notes = registry.announced_environments()
        assert [entry.qualified_name for entry in entries if entry.distribution != "torchhal"] == ["zeta/zeta"]
        names = {entry.component.alias for entry in registry.auto_accelerators().entries}
        assert "egg" in names and notes == []


# -- accelerator="auto" --------------------------------------------------------------------------------------


def auto(site: Any, name: str, module: str, alias: str = "board") -> None:
    stem = name.replace("-", "_")
    entry_points = f"[torchhal]\n{stem} = {stem}_manifest\n[torchhal.auto]\n{alias} = {module}\n"
    site.add(name, site.accelerator(alias), entry_points=entry_points)


def test_auto_skips_the_manifest_of_a_missing_module(site: Any, in_place: Any) -> None:
    """The note says what is missing, as it does for one whose manifest was imported."""
    auto(site, "acme", "no_such_vendor")
    in_place()
    (note,) = resolve(Request()).notes
    assert imported() == set()
    assert "installed but unusable: board: the Python module 'no_such_vendor' is not installed" in note


def test_auto_imports_the_manifest_of_a_module_that_is_there(site: Any, in_place: Any) -> None:
    auto(site, "acme", "json")
    auto(site, "zeta", "no_such_vendor", "plank")
    in_place()
    (note,) = resolve(Request()).notes
    assert imported() == {"acme"} and "plank: the Python module" in note and "board:" in note


def test_auto_says_nothing_of_a_disabled_one(site: Any, in_place: Any) -> None:
    auto(site, "acme", "no_such_vendor")
    in_place(TORCHHAL_DISABLE_PLUGINS="acme")
    assert resolve(Request()).notes == ()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Board = json", "the name must be an alias"),
        ("board = json.decoder", "the value must be a top-level module"),
        ("plank = json", "the distribution has no accelerator 'plank'"),
    ],
)
def test_wrong_module_declaration_is_a_problem(site: Any, line: str, reason: str) -> None:
    entry_points = f"[torchhal]\nacme = acme_manifest\n[torchhal.auto]\n{line}\n"
    site.add("acme", site.accelerator("board"), entry_points=entry_points)
    (record,) = site.registry().plugins()
    assert record.status == "loaded" and reason in record.problems[0]


def test_auto_asks_an_undeclared_accelerator(site: Any, in_place: Any) -> None:
    """A plugin of an earlier release declares nothing: its accelerator is found, and others stay unimported."""
    site.add("acme", site.accelerator("board", requires=("no_such_vendor",)))
    site.add("zeta", site.accelerator("plank").replace("torchhal_accelerators", "torchhal_strategies"))
    in_place()
    (note,) = resolve(Request()).notes
    assert imported() == {"acme"} and "board: the Python module 'no_such_vendor' is not installed" in note


SOURCES = {
    "a strategy": ("@hookimpl\ndef torchhal_strategies(): return []", False),
    "nothing": ("", False),
    "ends the process": ("import os\nos._exit(3)", False),
    "standard library": ("from __future__ import annotations\nimport sys, json\nfrom os import path", False),
    "an accelerator": ("@hookimpl\ndef torchhal_accelerators(): return []", True),
    "another name": ("@hookimpl(specname=NAME)\ndef x(): return []", True),
    "a star import": ("from torchhal.plugin import *", True),
    "a hook from elsewhere": ("from acme.hooks import mine", True),
    "a relative import": ("from . import hooks", True),
    "an import in a function": ("def f():\n    import acme.hooks", True),
    "attributes": ("setattr(object, 'a' + 'b', 1)", True),
    "globals": ("globals()['torchhal_' + 'accelerators'] = f", True),
    "module getattr": ("def __getattr__(name): ...", True),
    "the table of hooks": ("from torchhal.plugin import HOOKS", True),
}


@pytest.mark.parametrize(("source", "expected"), SOURCES.values(), ids=SOURCES)
def test_manifest_source(tmp_path: Path, source: str, expected: bool) -> None:
    """The answer is False only where the source shows that it brings no accelerator."""
    (tmp_path / "acme_source.py").write_text(f"from torchhal.plugin import Component, hookimpl\n{source}\n")
    assert may_implement("torchhal_accelerators", "acme_source", str(tmp_path)) is expected


def test_manifest_source_of_a_package(tmp_path: Path, monkeypatch: Any) -> None:
    """A manifest of an editable install is found without an import of its package; one that is nowhere may do all."""
    package = tmp_path / "acme_package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "acme_package" / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "_plugin.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not may_implement("torchhal_accelerators", "acme_package.inner._plugin", None)
    assert not may_implement("torchhal_accelerators", "acme_package.inner._plugin", os.path.join(tmp_path, "nowhere"))
    assert may_implement("torchhal_accelerators", "acme_package.missing", None)
    assert may_implement("torchhal_accelerators", "acme_nowhere._plugin", None)
    assert may_implement("torchhal_accelerators", "json.decoder", None)  # imported: it may have changed since


# -- what is said about it -----------------------------------------------------------------------------------


def test_doctor_and_plugins_name_what_is_not_announced(site: Any, in_place: Any, capsys: Any) -> None:
    """The line to add for an environment that nothing announces, and each declaration that is ignored."""
    from torchhal import cli

    add(site, "acme", "ACME-RANK = acme", ("my-acme", "Waiting"))
    add(site, "zeta", "ZETA_RANK = zeta", ("zeta", "Waiting"))
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "    problem: its entry_points.txt declares ACME-RANK = acme in [torchhal.detect], which is ignored" in shown
    (line,) = [line for line in shown.splitlines() if "is used when it is named only" in line]
    assert "'acme/my-acme'" in line and '[project.entry-points."torchhal.detect"] with VARIABLE = "my_acme"' in line
    in_place()
    assert cli.main(["plugins"]) == 0
    assert "  problem: its entry_points.txt declares ACME-RANK = acme" in capsys.readouterr().out
