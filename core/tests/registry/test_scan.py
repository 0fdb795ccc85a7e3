"""Which plugins are found, and what a manifest may do wrong without harm to others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

import torchhal
from torchhal.errors import (
    UnknownAliasError,
)
from torchhal.registry import Registry

# -- a sound plugin ------------------------------------------------------------------------------------------


def test_lookup_by_every_name(site: Any) -> None:
    """A component is found by each of its names."""
    site.add("Acme.Torchhal", site.accelerator("board", aliases=("plank",), summary="A board"))
    registry = site.registry()
    entry = registry.find("accelerator", "board")
    for name in ("BOARD", "plank", "Acme.Torchhal/board", "acme-torchhal/Board", "ACME__torchhal/plank"):
        assert registry.find("accelerator", name) is entry
    assert entry.qualified_name == "Acme.Torchhal/board"
    assert registry.entries("accelerator") == [registry.find("accelerator", "cpu"), entry]
    assert registry.aliases("accelerator") == ["board", "cpu", "plank"]


def test_its_record(site: Any) -> None:
    site.add("acme", site.accelerator("board", requires=("no_such_vendor",)), version="2.5")
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


def test_manifest_as_object(site: Any) -> None:
    """The manifest may be an object of a module."""
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


def test_the_first_unknown_alias_scans_once(site: Any) -> None:
    site.add("acme", site.accelerator("board"))
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


def test_installed_imports_nothing(site: Any) -> None:
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
    "syntax error": ("def f(:", "_manifest.py:2)"),
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
    "nothing in the list": (
        "@hookimpl\ndef torchhal_accelerators(): return []",
        "contributes nothing: torchhal_accelerators returned no Component",
    ),
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
def test_a_broken_plugin_costs_only_itself(case: str, site: Any) -> None:
    source, reason = BROKEN[case]
    for name in ("aaa", "zzz"):
        site.add(name, site.accelerator(f"{name}_board"))
    site.add("middle", source)
    records = site.records()
    assert [records[name].status for name in ("aaa", "zzz")] == ["loaded", "loaded"]
    broken = records["middle"]
    assert broken.status == "broken"
    assert reason in broken.reason
    assert "\n" not in broken.reason
    assert broken.file == str(site.folder / "middle_manifest.py")
    assert broken.components == ()


def test_unknown_optional_hook_is_accepted(site: Any) -> None:
    """A hook of a later torchhal may be marked optional."""
    site.add("acme", "@hookimpl(optionalhook=True)\ndef torchhal_futures(): return 3\n" + site.accelerator("board"))
    assert site.records()["acme"].status == "loaded"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("acme_manifest:missing", "AttributeError"),
        ("acme_missing", "No module named 'acme_missing'"),
        ("acme manifest!", "acme manifest!"),
    ],
)
def test_an_entry_point_that_leads_nowhere(value: str, reason: str, site: Any) -> None:
    site.add("acme", site.accelerator("board"), entry_points=f"[torchhal]\nacme = {value}\n")
    site.add("zzz", site.accelerator("plank"))
    records = site.records()
    assert records["acme"].status == "broken" and records["zzz"].status == "loaded"
    assert reason in records["acme"].reason
    assert "importlib" not in records["acme"].reason  # its innards are no place to look at


def test_interrupted_scan_is_repeated(site: Any) -> None:
    """Ctrl-C passes through a scan, and the next lookup scans again."""
    once = "import builtins\nif not hasattr(builtins, 'pressed'):\n    raise KeyboardInterrupt\n"
    site.add("acme", once + site.accelerator("board"))
    registry = site.registry()
    with pytest.raises(KeyboardInterrupt):
        registry.find("accelerator", "board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.pressed", True, raising=False)
        assert registry.find("accelerator", "board")


UNREADABLE = {"bytes": b"[console_scripts]\na = \xff\xfe:b\n", "lines": "[console_scripts]\nno equals sign\n"}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_entry_points_of_what_is_no_plugin(content: str | bytes, site: Any) -> None:
    site.add("other", entry_points=content)
    site.add("acme", site.accelerator("board"))
    assert list(site.records()) == ["acme"]


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_entry_points_of_a_plugin(content: str | bytes, site: Any) -> None:
    group = "[torchhal]\nother = other_manifest\n"
    site.add("other-thing", entry_points=group.encode() + content if isinstance(content, bytes) else group + content)
    site.add("acme", site.accelerator("board"))
    records = site.records()
    assert records["acme"].status == "loaded"
    assert records["other-thing"].status == "broken"
    assert "its entry_points.txt can't be read" in records["other-thing"].reason


@pytest.mark.parametrize("metadata", [b"Name: \xff\n", "", "Name: other\n\n", "Version: 1\n\n"])
def test_unreadable_metadata(metadata: str | bytes, site: Any) -> None:
    site.add("other-thing", site.accelerator("plank"), metadata=metadata)
    site.add("acme", site.accelerator("board"))
    records = site.records()
    assert records["acme"].status == "loaded"
    broken = records["other_thing"]
    assert (broken.status, broken.distribution, broken.version) == ("broken", "other-thing", None)
    assert "its METADATA can't be read" in broken.reason
    assert "other_thing_manifest" not in sys.modules


# -- which distributions -------------------------------------------------------------------------------------


def test_first_distribution_of_a_name(site: Any, tmp_path: Path) -> None:
    """The first of two distributions of one name counts."""
    site.add("acme", site.accelerator("board"), version="1.0")
    other = type(site)(tmp_path / "other")
    other.add("acme", site.accelerator("board"), version="2.0")
    for folders, version in (((site, other), "1.0"), ((other, site), "2.0")):
        path = [str(each.folder) for each in folders]
        registry = Registry(distributions=lambda path=path: importlib_metadata.distributions(path=path), environ={})  # type: ignore[misc]
        assert [record.version for record in registry.installed()] == [version]


def test_first_distribution_without_plugin(site: Any, tmp_path: Path) -> None:
    """The first distribution of a name counts even when it has no plugin."""
    site.add("acme", entry_points="")
    other = type(site)(tmp_path / "other")
    other.add("acme", site.accelerator("board"))
    path = [str(site.folder), str(other.folder)]
    assert Registry(distributions=lambda: importlib_metadata.distributions(path=path)).installed() == []


def test_what_pip_left_behind(site: Any, tmp_path: Path) -> None:
    site.add("acme", metadata="", entry_points="", version="1.0")  # uninstalled, the folder stayed
    other = type(site)(tmp_path / "other")
    other.add("acme", "raise RuntimeError", version="2.0")
    other.add("acme", info="~cme-2.0.dist-info")
    path = [str(site.folder), str(other.folder)]
    registry = Registry(distributions=lambda: importlib_metadata.distributions(path=path), environ={})
    assert [(record.version, record.status) for record in registry.installed()] == [("2.0", "found")]


def test_requirements_of_an_egg_info(site: Any) -> None:
    folder = site.add("acme", site.accelerator("board"), requires=(), info="acme.egg-info")
    (folder / "METADATA").rename(folder / "PKG-INFO")
    (folder / "requires.txt").write_text("torchhal<0.0.1\n")
    assert site.records()["acme"].status == "incompatible"


def test_one_name_for_two_manifests_of_a_distribution(site: Any) -> None:
    entry_points = "[torchhal]\na = acme_manifest\na = nowhere\na = acme_manifest\n"
    site.add("acme", site.accelerator("board"), entry_points=entry_points)
    assert [(record.status, record.name) for record in site.registry().plugins()] == [("loaded", "a"), ("broken", "a")]


@pytest.mark.parametrize("name", ["user", "TorchHAL"])
def test_names_that_mean_something_else(name: str, site: Any) -> None:
    site.add(name, site.accelerator("board"))
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
    requires: list[str], core: str, status: str, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchhal, "__version__", core)
    site.add("acme", site.accelerator("board"), requires=requires)
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
def test_allow_and_deny(environ: dict[str, str], loaded: str, site: Any) -> None:
    for name in ("one", "two", "three"):
        site.add(
            f"Acme-{name.title()}",
            site.accelerator(f"{name}_board"),
            entry_points=f"[torchhal]\n{name} = acme_{name}_manifest",
        )
    records = site.records(**environ)
    assert " ".join(sorted(name for name, record in records.items() if record.status == "loaded")) == loaded
    for name, record in records.items():
        assert record.status in ("loaded", "disabled")
        assert (f"acme_{name}_manifest" in sys.modules) == (record.status == "loaded")
        assert bool(record.reason) == (record.status == "disabled")


def test_a_name_that_matches_nothing_warns(site: Any) -> None:
    site.add("acme", site.accelerator("board"))
    with pytest.warns(UserWarning) as caught:
        site.records(TORCHHAL_PLUGINS="acme,akme", TORCHHAL_DISABLE_PLUGINS="ackme")
    assert [str(warning.message).split(",")[0] for warning in caught] == [
        "TORCHHAL_PLUGINS names 'akme'",
        "TORCHHAL_DISABLE_PLUGINS names 'ackme'",
    ]


@pytest.mark.filterwarnings("error")
def test_all_of_no_plugins_warns_of_nothing(site: Any) -> None:
    assert site.records(TORCHHAL_PLUGINS="*", TORCHHAL_DISABLE_PLUGINS="*") == {}


def test_warning_as_error_keeps_registry(site: Any) -> None:
    """The warning as an error leaves a registry that works."""
    site.add("acme", site.accelerator("board"))
    registry = site.registry(TORCHHAL_DISABLE_PLUGINS="ackme")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            registry.plugins()
        assert registry.find("accelerator", "board")


def test_the_process_environment_is_the_default(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("acme", site.accelerator("board"))
    monkeypatch.setenv("TORCHHAL_DISABLE_PLUGINS", "acme")
    assert [record.status for record in Registry(distributions=site.distributions).plugins()] == ["disabled"]
