"""The scan: distributions on disk, what their manifests may do wrong, and the look-up of what they provide."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

import torchhal
from torchhal.errors import (
    AmbiguousAliasError,
    BrokenPluginError,
    ComponentError,
    IncompatiblePluginError,
    PluginError,
    UnknownAliasError,
)
from torchhal.registry import PluginRecord, Registry
from torchhal.testing import isolated_registry

HEADER = "from torchhal.plugin import Component, hookimpl\n"


def accelerator(alias: str, **fields: object) -> str:
    """The source of a manifest with one accelerator."""
    more = "".join(f", {name}={value!r}" for name, value in fields.items())
    return f"@hookimpl\ndef torchhal_accelerators():\n    return [Component({alias!r}, 'nowhere:Class'{more})]\n"


class Site:
    """A folder as pip leaves it: modules with their dist-info beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ: dict[str, str] = {}
        folder.mkdir()

    def add(
        self,
        name: str,
        manifest: str | None = None,
        *,
        version: str = "1.0",
        requires: Iterable[str] = ("torchhal>=0.0.1",),
        entry_points: str | bytes | None = None,
        metadata: str | bytes | None = None,
        info: str | None = None,
    ) -> Path:
        stem = name.lower().replace("-", "_").replace(".", "_")
        dist_info = self.folder / (info or f"{stem}-{version}.dist-info")
        dist_info.mkdir()
        if manifest is not None:
            (self.folder / f"{stem}_manifest.py").write_text(HEADER + textwrap.dedent(manifest))
        if entry_points is None:
            entry_points = f"[torchhal]\n{stem} = {stem}_manifest\n"
        if metadata is None:
            lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
            metadata = "\n".join(["Metadata-Version: 2.1", *lines, "", "A description."])
        for file, content in (("entry_points.txt", entry_points), ("METADATA", metadata)):
            if content:
                (dist_info / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return dist_info

    def distributions(self) -> Iterable[Any]:
        return importlib_metadata.distributions(path=[str(self.folder)])

    def registry(self, **environ: str) -> Registry:
        return Registry(distributions=self.distributions, environ=environ)

    def records(self, **environ: str) -> dict[str, PluginRecord]:
        return {record.name: record for record in self.registry(**environ).plugins()}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    site = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(site.folder)
    yield site
    for name in set(sys.modules) - before:
        if name.endswith("_manifest"):
            del sys.modules[name]


# -- a sound plugin ------------------------------------------------------------------------------------------


def test_a_plugin_is_found_by_every_one_of_its_names(site: Site) -> None:
    site.add("Acme.Torchhal", accelerator("board", aliases=("plank",), summary="A board"))
    registry = site.registry()
    entry = registry.find("accelerator", "board")
    for name in ("BOARD", "plank", "Acme.Torchhal/board", "acme-torchhal/Board", "ACME__torchhal/plank"):
        assert registry.find("accelerator", name) is entry
    assert entry.qualified_name == "Acme.Torchhal/board"
    assert registry.entries("accelerator") == [registry.find("accelerator", "cpu"), entry]
    assert registry.aliases("accelerator") == ["board", "cpu", "plank"]


def test_its_record(site: Site) -> None:
    site.add("acme", accelerator("board", requires=("no_such_vendor",)), version="2.5")
    record = site.records()["acme"]
    assert (record.distribution, record.version, record.status, record.reason) == ("acme", "2.5", "loaded", "")
    assert record.file == str(site.folder / "acme_manifest.py")
    assert record.load_ms is not None and 0 < record.load_ms < 60_000
    assert set(record.to_dict()) == {
        "name", "distribution", "version", "status", "reason", "file", "load_ms", "components",
    }  # fmt: skip
    assert record.to_dict()["components"] == [
        {
            "kind": "accelerator",
            "alias": "board",
            "aliases": [],
            "target": "nowhere:Class",
            "summary": "",
            "available": False,
            "reason": "the Python module 'no_such_vendor' is not installed",
        }
    ]


def test_the_manifest_may_be_an_object_of_a_module(site: Site) -> None:
    manifest = """
        class Manifest:
            @hookimpl
            def torchhal_accelerators(self):
                return (Component("board", "nowhere:Class"),)

            @hookimpl(specname="torchhal_precisions")
            def narrow(self, optional=3):
                return [Component("8-true", "nowhere:Class")]

        manifest = Manifest()
    """
    site.add("acme", manifest, entry_points="[torchhal]\nacme = acme_manifest:manifest\n")
    assert site.registry().find("precision", "8-true").plugin == "acme"
    assert site.registry().find("accelerator", "board")


def test_built_in_aliases_need_no_scan() -> None:
    def scan() -> Iterable[Any]:
        raise AssertionError("scanned")

    registry = Registry(distributions=scan)
    assert registry.find("strategy", "DDP").distribution == "torchhal"
    assert registry.find("accelerator", "torchhal/cpu").kind == "accelerator"
    with pytest.raises(AssertionError, match="scanned"):
        registry.find("strategy", "other")


def test_the_first_unknown_alias_scans_once(site: Site) -> None:
    site.add("acme", accelerator("board"))
    scans = []

    def distributions() -> Iterable[Any]:
        scans.append(1)
        return site.distributions()

    registry = Registry(distributions=distributions, environ={})
    for _ in range(3):
        registry.find("accelerator", "board")
        with pytest.raises(UnknownAliasError):
            registry.find("accelerator", "beard")
    assert len(scans) == 1


def test_installed_imports_nothing(site: Site) -> None:
    site.add("acme", "raise RuntimeError")
    site.add("old", "raise RuntimeError", requires=["torchhal<0.0.1"])
    records = site.registry().installed()
    assert [(record.name, record.status, record.load_ms) for record in records] == [
        ("acme", "found", None),
        ("old", "incompatible", None),
    ]
    assert "acme_manifest" not in sys.modules


# -- isolation -----------------------------------------------------------------------------------------------

BROKEN = {
    "import error": ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all' ("),
    "syntax error": ("def f(:", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "cancelled": ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    "endless recursion": ("def f(): f()\nf()", "RecursionError"),
    "an error without text": (
        "class Mute(BaseException):\n    def __str__(self): raise ValueError\nraise Mute",
        "Mute (",
    ),
    "an odd error text": ("raise ValueError('two\\nlines')", "ValueError: two lines ("),
    "nothing": ("", "contributes nothing; it needs a function marked"),
    "no such hook": (
        "@hookimpl\ndef torchhal_acelerators(): return []",
        "'torchhal_acelerators' (line 2) is no hook of torchhal; did you mean 'torchhal_accelerators'?",
    ),
    "a hook of another prefix": ("@hookimpl\ndef accelerators(): return []", "'accelerators' (line 2) is no hook"),
    "no marker": (
        "def torchhal_accelerators(): return []",
        "'torchhal_accelerators' (line 2) is not marked with torchhal.plugin.hookimpl",
    ),
    "no marker, misspelt": (
        "def torchhal_accelerator(): return []",
        "contributes nothing; 'torchhal_accelerator' (line 2) is no hook of torchhal; did you mean",
    ),
    "no function": (
        "torchhal_accelerators = []",
        "must be a function marked with torchhal.plugin.hookimpl (got a list)",
    ),
    "another project's marker": (
        "import pluggy\n@pluggy.HookimplMarker('pytest')\ndef torchhal_accelerators(): return []",
        "is not marked with torchhal.plugin.hookimpl",
    ),
    "None": ("@hookimpl\ndef torchhal_accelerators(): pass", "torchhal_accelerators returned None"),
    "a dict": ("@hookimpl\ndef torchhal_accelerators(): return {}", "returned a dict, not a list of Component"),
    "a generator": (
        "@hookimpl\ndef torchhal_accelerators(): yield Component('a', 'm:C')",
        "returned a generator, not a list of Component",
    ),
    "a coroutine": ("@hookimpl\nasync def torchhal_accelerators(): return []", "returned a coroutine"),
    "one component": (
        "@hookimpl\ndef torchhal_accelerators(): return Component('a', 'm:C')",
        "returned a Component, not a list",
    ),
    "a string among components": (
        "@hookimpl\ndef torchhal_accelerators(): return [Component('a', 'm:C'), 'b']",
        "returned a list with a str, not a Component, in it",
    ),
    "nothing in the list": ("@hookimpl\ndef torchhal_accelerators(): return []", "contributes nothing"),
    "an argument": (
        "@hookimpl\ndef torchhal_accelerators(zeta, alpha): return []",
        "takes 'zeta', 'alpha', which the hook doesn't pass (it passes nothing)",
    ),
    "a keyword": ("@hookimpl\ndef torchhal_accelerators(*, config): return []", "takes 'config'"),
    "a hook that raises": (
        "@hookimpl\ndef torchhal_accelerators(): return 1 / 0",
        "ZeroDivisionError: division by zero (",
    ),
    "a hook that exits": ("@hookimpl\ndef torchhal_accelerators(): raise SystemExit", "SystemExit ("),
    "an optional hook alone": (
        "@hookimpl(optionalhook=True)\ndef torchhal_futures(): return []",
        "contributes nothing",
    ),
    **{
        option: (f"@hookimpl({option}=True)\ndef torchhal_accelerators(): yield", f"(line 2) asks for {option!r}")
        for option in ("hookwrapper", "wrapper", "tryfirst", "trylast")
    },
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.filterwarnings("error")
def test_a_broken_plugin_costs_only_itself(case: str, site: Site) -> None:
    source, reason = BROKEN[case]
    for name in ("aaa", "zzz"):
        site.add(name, accelerator(f"{name}_board"))
    site.add("middle", source)
    records = site.records()
    assert [records[name].status for name in ("aaa", "zzz")] == ["loaded", "loaded"]
    broken = records["middle"]
    assert broken.status == "broken"
    assert reason in broken.reason
    assert "\n" not in broken.reason
    assert broken.file == str(site.folder / "middle_manifest.py")
    assert broken.components == ()


def test_a_hook_of_a_later_torchhal_may_be_marked_optional(site: Site) -> None:
    site.add("acme", "@hookimpl(optionalhook=True)\ndef torchhal_futures(): return 3\n" + accelerator("board"))
    assert site.records()["acme"].status == "loaded"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("acme_manifest:missing", "AttributeError"),
        ("acme_missing", "No module named 'acme_missing'"),
        ("acme manifest!", "acme manifest!"),
    ],
)
def test_an_entry_point_that_leads_nowhere(value: str, reason: str, site: Site) -> None:
    site.add("acme", accelerator("board"), entry_points=f"[torchhal]\nacme = {value}\n")
    site.add("zzz", accelerator("plank"))
    records = site.records()
    assert records["acme"].status == "broken" and records["zzz"].status == "loaded"
    assert reason in records["acme"].reason


def test_ctrl_c_passes_and_the_next_look_up_scans_again(site: Site) -> None:
    site.add(
        "acme",
        "import builtins\nif not hasattr(builtins, 'pressed'):\n    raise KeyboardInterrupt\n" + accelerator("board"),
    )
    registry = site.registry()
    with pytest.raises(KeyboardInterrupt):
        registry.find("accelerator", "board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.pressed", True, raising=False)
        assert registry.find("accelerator", "board")


UNREADABLE = {"bytes": b"[console_scripts]\na = \xff\xfe:b\n", "lines": "[console_scripts]\nno equals sign\n"}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_entry_points_of_what_is_no_plugin(content: str | bytes, site: Site) -> None:
    site.add("other", entry_points=content)
    site.add("acme", accelerator("board"))
    assert list(site.records()) == ["acme"]


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_entry_points_of_a_plugin(content: str | bytes, site: Site) -> None:
    group = "[torchhal]\nother = other_manifest\n"
    site.add("other-thing", entry_points=group.encode() + content if isinstance(content, bytes) else group + content)
    site.add("acme", accelerator("board"))
    records = site.records()
    assert records["acme"].status == "loaded"
    assert records["other-thing"].status == "broken"
    assert "its entry_points.txt can't be read" in records["other-thing"].reason


@pytest.mark.parametrize("metadata", [b"Name: \xff\n", "", "Name: other\n\n", "Version: 1\n\n"])
def test_unreadable_metadata(metadata: str | bytes, site: Site) -> None:
    site.add("other-thing", accelerator("plank"), metadata=metadata)
    site.add("acme", accelerator("board"))
    records = site.records()
    assert records["acme"].status == "loaded"
    broken = records["other_thing"]
    assert (broken.status, broken.distribution, broken.version) == ("broken", "other-thing", None)
    assert "its METADATA can't be read" in broken.reason
    assert "other_thing_manifest" not in sys.modules


# -- which distributions -------------------------------------------------------------------------------------


def test_the_first_of_two_distributions_of_one_name_counts(site: Site, tmp_path: Path) -> None:
    site.add("acme", accelerator("board"), version="1.0")
    other = Site(tmp_path / "other")
    other.add("acme", accelerator("board"), version="2.0")
    for folders, version in (((site, other), "1.0"), ((other, site), "2.0")):
        path = [str(each.folder) for each in folders]
        registry = Registry(distributions=lambda path=path: importlib_metadata.distributions(path=path), environ={})  # type: ignore[misc]
        assert [record.version for record in registry.installed()] == [version]


def test_the_first_counts_even_when_it_is_no_plugin(site: Site, tmp_path: Path) -> None:
    site.add("acme", entry_points="")
    other = Site(tmp_path / "other")
    other.add("acme", accelerator("board"))
    path = [str(site.folder), str(other.folder)]
    assert Registry(distributions=lambda: importlib_metadata.distributions(path=path)).installed() == []


def test_what_pip_left_behind(site: Site) -> None:
    site.add("acme", accelerator("board"), version="2.0")
    site.add("acme", metadata="", entry_points="", version="1.0")  # sorts first, holds nothing
    site.add("acme", info="~cme-2.0.dist-info")
    assert [(record.version, record.status) for record in site.registry().plugins()] == [("2.0", "loaded")]


def test_requirements_of_an_egg_info(site: Site) -> None:
    folder = site.add("acme", accelerator("board"), requires=(), info="acme.egg-info")
    (folder / "METADATA").rename(folder / "PKG-INFO")
    (folder / "requires.txt").write_text("torchhal<0.0.1\n")
    assert site.records()["acme"].status == "incompatible"


def test_one_name_for_two_manifests_of_a_distribution(site: Site) -> None:
    site.add(
        "acme", accelerator("board"), entry_points="[torchhal]\na = acme_manifest\na = nowhere\na = acme_manifest\n"
    )
    assert [(record.status, record.name) for record in site.registry().plugins()] == [("loaded", "a"), ("broken", "a")]


@pytest.mark.parametrize("name", ["user", "TorchHAL"])
def test_names_that_mean_something_else(name: str, site: Site) -> None:
    site.add(name, accelerator("board"))
    (record,) = site.registry().plugins()
    assert record.status == "broken" and "can't provide plugins" in record.reason


# -- versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "core", "status"),
    [
        (["torchhal>=0.1"], "0.2.0.dev3", "loaded"),
        (["torchhal>=0.1,<1"], "1.0.0", "incompatible"),
        (["torchhal>=0.2"], "0.1.9", "incompatible"),
        (["TorchHAL [trainer] >= 0.2"], "0.1.9", "incompatible"),
        (["torchhal>=0.1", "torchhal!=0.1.5"], "0.1.5", "incompatible"),
        (["torchhal>=9; python_version < '3'"], "0.1.0", "loaded"),
        (["torchhal>=9; python_version > '3'"], "0.1.0", "incompatible"),
        (["torchhal>=9; extra == 'test'"], "0.1.0", "loaded"),
        (["torchhal-simulator>=9", "torchhal_sim>=9"], "0.1.0", "loaded"),
        (["torchhal"], "0.1.0a1", "loaded"),
        (["torchhal @ https://example.org/torchhal.whl"], "0.1.0", "loaded"),
        (["numpy (>=1", "torchhal"], "0.1.0", "loaded"),
        (["torchhal >>1"], "0.1.0", "broken"),
        ([], "0.1.0", "loaded"),
    ],
)
def test_requirements_on_torchhal(
    requires: list[str], core: str, status: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhal, "__version__", core)
    site.add("acme", accelerator("board"), requires=requires)
    record = site.records()["acme"]
    assert record.status == status
    assert ("acme_manifest" in sys.modules) == (status == "loaded")
    if status == "incompatible":
        assert record.reason.startswith("it requires torchhal") and record.reason.endswith(f"this is torchhal {core}")


# -- the environment's lists ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "loaded"),
    [
        ({}, "one three two"),
        ({"TORCHHAL_PLUGINS": ""}, ""),
        ({"TORCHHAL_PLUGINS": " , "}, ""),
        ({"TORCHHAL_PLUGINS": "*"}, "one three two"),
        ({"TORCHHAL_PLUGINS": " ONE , acme_two"}, "one two"),
        ({"TORCHHAL_PLUGINS": "Acme.Two"}, "two"),
        ({"TORCHHAL_DISABLE_PLUGINS": ""}, "one three two"),
        ({"TORCHHAL_DISABLE_PLUGINS": "acme-one,three"}, "two"),
        ({"TORCHHAL_DISABLE_PLUGINS": "*"}, ""),
        ({"TORCHHAL_PLUGINS": "one,two", "TORCHHAL_DISABLE_PLUGINS": "two"}, "one"),
        ({"TORCHHAL_PLUGINS": "*", "TORCHHAL_DISABLE_PLUGINS": "*"}, ""),
    ],
)
@pytest.mark.filterwarnings("error")
def test_allow_and_deny(environ: dict[str, str], loaded: str, site: Site) -> None:
    for name in ("one", "two", "three"):
        site.add(
            f"Acme-{name.title()}",
            accelerator(f"{name}_board"),
            entry_points=f"[torchhal]\n{name} = acme_{name}_manifest",
        )
    records = site.records(**environ)
    assert " ".join(sorted(name for name, record in records.items() if record.status == "loaded")) == loaded
    for name, record in records.items():
        assert record.status in ("loaded", "disabled")
        assert (f"acme_{name}_manifest" in sys.modules) == (record.status == "loaded")
        assert bool(record.reason) == (record.status == "disabled")


def test_a_name_that_matches_nothing_warns(site: Site) -> None:
    site.add("acme", accelerator("board"))
    with pytest.warns(UserWarning) as caught:
        site.records(TORCHHAL_PLUGINS="acme,akme", TORCHHAL_DISABLE_PLUGINS="ackme")
    assert [str(warning.message).split(",")[0] for warning in caught] == [
        "TORCHHAL_PLUGINS names 'akme'",
        "TORCHHAL_DISABLE_PLUGINS names 'ackme'",
    ]


def test_the_warning_as_an_error_leaves_a_registry_that_works(site: Site) -> None:
    site.add("acme", accelerator("board"))
    registry = site.registry(TORCHHAL_DISABLE_PLUGINS="ackme")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            registry.plugins()
        assert registry.find("accelerator", "board")


def test_the_process_environment_is_the_default(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("acme", accelerator("board"))
    monkeypatch.setenv("TORCHHAL_DISABLE_PLUGINS", "acme")
    assert [record.status for record in Registry(distributions=site.distributions).plugins()] == ["disabled"]


# -- components and conflicts --------------------------------------------------------------------------------


def test_one_bad_component_costs_only_itself(site: Site) -> None:
    source = """
        class Hostile(dict):
            def __iter__(self):
                raise OSError("no")

        @hookimpl
        def torchhal_accelerators():
            return [
                Component("Not An Alias", "m:C"),
                Component("good", "m:C"),
                Component("letters", "m:C", requires="abc"),
                Component(["list"], "m:C"),
                Component("hostile", "m:C", defaults=Hostile()),
                Component("cpu", "m:C"),
                Component("other", "m:C", aliases=("cpu",)),
                Component("good", "m:Other"),
            ]
    """
    site.add("acme", source)
    registry = site.registry()
    (record,) = registry.plugins()
    assert record.status == "loaded"
    problems = [entry.problem for entry in record.components]
    for problem, words in zip(
        problems,
        [
            "an alias must be",
            "",
            "a tuple",
            "must be a str",
            "OSError: no",
            "core's own",
            "core's own",
            "another component",
        ],
        strict=True,
    ):
        assert words in problem and bool(words) == bool(problem)
    assert registry.aliases("accelerator") == ["cpu", "good"]
    assert registry.find("accelerator", "good").component.target == "m:C"
    assert registry.find("accelerator", "cpu").distribution == "torchhal"
    for alias in ("letters", "hostile", "not an alias", "acme/cpu"):
        with pytest.raises(ComponentError, match="can't be used"):
            registry.find("accelerator", alias)


def test_a_sound_provider_wins_over_an_unusable_one(site: Site) -> None:
    site.add("acme", accelerator("board", requires="abc"))
    site.add("zeta", accelerator("board"))
    registry = site.registry()
    assert registry.find("accelerator", "board").distribution == "zeta"
    with pytest.raises(ComponentError, match="must be a tuple"):
        registry.find("accelerator", "acme/board")


def test_the_same_alias_for_two_kinds_is_no_conflict(site: Site) -> None:
    site.add("acme", accelerator("board"))
    site.add("zeta", accelerator("board").replace("torchhal_accelerators", "torchhal_strategies"))
    registry = site.registry()
    assert registry.find("accelerator", "board").distribution == "acme"
    assert registry.find("strategy", "board").distribution == "zeta"


def test_two_plugins_with_one_alias(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Site(tmp_path / "other")
    monkeypatch.syspath_prepend(other.folder)
    site.add("acme", accelerator("board"))
    other.add("Zeta", accelerator("plank", aliases=("board",)))
    for folders in ((site, other), (other, site)):
        path = [str(each.folder) for each in folders]
        registry = Registry(distributions=lambda path=path: importlib_metadata.distributions(path=path), environ={})  # type: ignore[misc]
        with pytest.raises(AmbiguousAliasError) as caught:
            registry.find("accelerator", "Board")
        assert caught.value.candidates == ("acme/board", "Zeta/board")
        assert "'acme/board' and 'Zeta/board'" in str(caught.value)
        assert registry.find("accelerator", "acme/board").distribution == "acme"
        assert registry.find("accelerator", "zeta/board").distribution == "Zeta"
        assert registry.aliases("accelerator") == ["Zeta/board", "acme/board", "cpu", "plank"]
        assert [record.name for record in registry.plugins()] == ["acme", "zeta"]
        for name in registry.aliases("accelerator"):
            assert registry.find("accelerator", name)


# -- strict mode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "error", "words"),
    [
        ({"manifest": "raise OSError('libx')"}, BrokenPluginError, "libx"),
        ({"manifest": ""}, BrokenPluginError, "contributes nothing"),
        ({"requires": ["torchhal<0.0.1"]}, IncompatiblePluginError, "it requires torchhal<0.0.1"),
        ({"manifest": accelerator("a--b")}, ComponentError, "a--b"),
    ],
)
def test_strict_mode_raises(plugin: dict[str, Any], error: type[Exception], words: str, site: Site) -> None:
    site.add("acme", **{"manifest": accelerator("board"), **plugin})
    site.add("zeta", "raise SystemExit")
    for value in ("", "0"):
        assert site.records(TORCHHAL_STRICT_PLUGINS=value)
    registry = site.registry(TORCHHAL_STRICT_PLUGINS="1")
    assert registry.find("accelerator", "cpu")
    for ask in (registry.plugins, lambda: registry.find("accelerator", "x"), lambda: registry.entries("strategy")):
        with pytest.raises(error, match=words) as caught:
            ask()
        assert caught.type is error
    if words == "libx":
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.__traceback__ is not None


def test_a_disabled_plugin_is_no_fault_in_strict_mode(site: Site) -> None:
    site.add("acme", "raise OSError")
    assert site.records(TORCHHAL_STRICT_PLUGINS="1", TORCHHAL_DISABLE_PLUGINS="acme")["acme"].status == "disabled"


# -- threads, manifests that ask, refresh --------------------------------------------------------------------


def test_a_second_thread_waits_for_the_scan(site: Site) -> None:
    site.add(
        "acme",
        "import time, sys\nsys.acme_imports = getattr(sys, 'acme_imports', 0) + 1\ntime.sleep(0.3)\n"
        + accelerator("board"),
    )
    registry, found = site.registry(), []
    threads = [threading.Thread(target=lambda: found.append(registry.find("accelerator", "board"))) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == 4 and len(set(map(id, found))) == 1
        assert sys.acme_imports == 1  # type: ignore[attr-defined]
    finally:
        del sys.acme_imports  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "call",
    [
        "find('accelerator', 'board')",
        "find('accelerator', 'cpu')",
        "aliases('strategy')",
        "entries('strategy')",
        "plugins()",
        "refresh()",
    ],
)
def test_a_manifest_that_asks_the_registry(call: str, site: Site) -> None:
    site.add("acme", f"from torchhal import registry\nregistry.{call}")
    with isolated_registry(distributions=site.distributions()) as registry:
        (record,) = registry.plugins()
        assert record.status == "broken"
        assert f"{call} was called by a plugin's manifest" in record.reason
        assert registry.find("accelerator", "cpu")


def test_a_manifest_that_registers(site: Site) -> None:
    site.add("acme", "import torchhal\ntorchhal.register('precision', 'mine', object)")
    with isolated_registry(distributions=site.distributions()) as registry:
        (record,) = registry.plugins()
    assert "it contributes what torchhal_precisions() returns" in record.reason


def test_a_failure_is_kept_until_refresh(site: Site) -> None:
    site.add("acme", "raise OSError('first')")
    registry = site.registry()
    for _ in range(2):
        with pytest.raises(UnknownAliasError, match=r"plugin 'acme' \(acme 1.0\) is broken: OSError: first"):
            registry.find("accelerator", "board")
        (site.folder / "acme_manifest.py").write_text(HEADER + accelerator("board"))
    registry.refresh()
    assert registry.find("accelerator", "board")


def test_a_plugin_installed_meanwhile(site: Site) -> None:
    registry = site.registry()
    with pytest.raises(UnknownAliasError) as caught:
        registry.find("accelerator", "board")
    assert "refresh()" not in str(caught.value)
    site.add("acme", accelerator("board"))
    with pytest.raises(UnknownAliasError, match=r"torchhal\.registry\.refresh\(\)"):
        registry.find("accelerator", "board")
    registry.refresh()
    assert registry.find("accelerator", "board")


def test_scans_leave_nothing_behind(site: Site) -> None:
    for name in ("acme", "beta"):
        site.add(name, accelerator(f"{name}_board"))
    site.add("worse", "raise SystemExit")
    registry = site.registry()

    def left() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(sys.modules)

    registry.plugins()
    before = left()
    for _ in range(100):
        registry.refresh()
        registry.plugins()
        registry.find("accelerator", "acme_board")
    assert left() == before


# -- an unknown alias ----------------------------------------------------------------------------------------


def message(registry: Registry, kind: str, alias: str) -> str:
    with pytest.raises(UnknownAliasError) as caught:
        registry.find(kind, alias)
    assert (caught.value.kind, caught.value.alias) == (kind, alias)
    return str(caught.value)


def test_an_unknown_alias_gets_what_exists_and_what_failed(site: Site) -> None:
    site.add("acme", accelerator("board"))
    site.add("beta", "raise SystemExit(3)")
    site.add("gamma", accelerator("gear"), requires=["torchhal<0.0.1"])
    site.add("delta", accelerator("disc"))
    text = message(site.registry(TORCHHAL_DISABLE_PLUGINS="delta"), "accelerator", "bord")
    assert "no accelerator is called 'bord'; there are 'board', 'cpu'" in text
    assert "did you mean 'board'?" in text
    assert "plugin 'beta' (beta 1.0) is broken: SystemExit: 3" in text
    assert "plugin 'gamma' (gamma 1.0) is incompatible: it requires torchhal<0.0.1" in text
    assert "plugin 'delta' (delta 1.0) is disabled: TORCHHAL_DISABLE_PLUGINS names it" in text
    assert "acme" not in text


def test_an_alias_of_a_plugin_of_ours(site: Site) -> None:
    registry = site.registry()
    assert "'TPU' comes with torchhal-xla: pip install torchhal-xla" in message(registry, "accelerator", "TPU")
    assert "did you mean 'tpu'? (pip install torchhal-xla)" in message(registry, "accelerator", "tpux")
    assert "pip install" not in message(registry, "precision", "tpux")


def test_no_install_hint_for_what_is_installed(site: Site) -> None:
    site.add("torchhal-xla", "raise OSError('libtpu')")
    text = message(site.registry(), "accelerator", "tpu")
    assert "pip install" not in text
    assert "is broken: OSError: libtpu" in text


def test_an_alias_of_another_kind(site: Site) -> None:
    assert "'ddp' is the alias of a part of another kind: strategy" in message(site.registry(), "accelerator", "ddp")


def test_auto_is_no_alias(site: Site) -> None:
    assert "'auto' is no alias" in message(site.registry(), "accelerator", "auto")


@pytest.mark.parametrize(
    "alias", ["", "/", "/cpu", "nobody/cpu", "a/b/cpu", "torchhal/board", "user/cpu", "acme/", "c pu"]
)
def test_aliases_of_nothing(alias: str, site: Site) -> None:
    site.add("acme", accelerator("board"))
    assert repr(alias) in message(site.registry(), "accelerator", alias)


def test_wrong_questions(site: Site) -> None:
    registry = site.registry()
    with pytest.raises(ValueError, match=r"'kind' must be one of 'accelerator', .*got 'accelerators'"):
        registry.find("accelerators", "cpu")
    with pytest.raises(ValueError, match="'kind' must be"):
        registry.aliases("x")
    with pytest.raises(TypeError, match="'alias' must be a str"):
        registry.find("accelerator", 3)  # type: ignore[arg-type]
    assert issubclass(UnknownAliasError, (LookupError, PluginError))
