"""What a scan leaves to be looked up, who may ask when, and what an unknown alias is told."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

from torchhal.errors import (
    AmbiguousAliasError,
    BrokenPluginError,
    ComponentError,
    IncompatiblePluginError,
    PluginError,
    UnknownAliasError,
)
from torchhal.registry import Registry
from torchhal.testing import isolated_registry

BAD_ALIAS = "@hookimpl\ndef torchhal_accelerators(): return [Component('a--b', 'm:C')]"


# -- components and conflicts --------------------------------------------------------------------------------


def test_one_bad_component_costs_only_itself(site: Any) -> None:
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
                Component("letters", "m:Spelt"),
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
            "",
        ],
        strict=True,
    ):
        assert words in problem and bool(words) == bool(problem)
    assert registry.aliases("accelerator") == ["cpu", "good", "letters"]
    assert registry.find("accelerator", "good").component.target == "m:C"
    assert registry.find("accelerator", "letters").component.target == "m:Spelt"
    assert registry.find("accelerator", "cpu").distribution == "torchhal"
    for alias in ("hostile", "not an alias", "acme/cpu"):
        with pytest.raises(ComponentError, match="can't be used"):
            registry.find("accelerator", alias)


def test_a_sound_provider_wins_over_an_unusable_one(site: Any) -> None:
    site.add("acme", site.accelerator("board", requires="abc"))
    site.add("zeta", site.accelerator("board"))
    registry = site.registry()
    assert registry.find("accelerator", "board").distribution == "zeta"
    with pytest.raises(ComponentError, match="must be a tuple"):
        registry.find("accelerator", "acme/board")


def test_same_alias_of_two_kinds(site: Any) -> None:
    """The same alias for two kinds is no conflict."""
    site.add("acme", site.accelerator("board"))
    site.add("zeta", site.accelerator("board").replace("torchhal_accelerators", "torchhal_strategies"))
    registry = site.registry()
    assert registry.find("accelerator", "board").distribution == "acme"
    assert registry.find("strategy", "board").distribution == "zeta"


def test_two_plugins_with_one_alias(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = type(site)(tmp_path / "other")
    monkeypatch.syspath_prepend(other.folder)
    site.add("acme", site.accelerator("board"))
    other.add("Zeta", site.accelerator("plank", aliases=("board",)))
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
        ({"manifest": BAD_ALIAS}, ComponentError, "a--b"),
    ],
)
def test_strict_mode_raises(plugin: dict[str, Any], error: type[Exception], words: str, site: Any) -> None:
    site.add("acme", **{"manifest": site.accelerator("board"), **plugin})
    site.add("zeta", "raise SystemExit")
    for value in ("", "0"):
        assert site.records(TORCHHAL_STRICT_PLUGINS=value)
    registry = site.registry(TORCHHAL_STRICT_PLUGINS="1")
    assert registry.find("accelerator", "cpu")
    for ask in (
        *[registry.plugins] * 10,
        lambda: registry.find("accelerator", "x"),
        lambda: registry.entries("strategy"),
    ):
        with pytest.raises(error, match=words) as caught:
            ask()
        assert caught.type is error
        assert len(caught.traceback) < 10  # an error that is kept doesn't collect where it was raised before
    if words == "libx":
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.__traceback__ is not None


def test_disabled_plugin_in_strict_mode(site: Any) -> None:
    """A disabled plugin is no fault in strict mode."""
    site.add("acme", "raise OSError")
    assert site.records(TORCHHAL_STRICT_PLUGINS="1", TORCHHAL_DISABLE_PLUGINS="acme")["acme"].status == "disabled"


# -- threads, manifests that ask, refresh --------------------------------------------------------------------


def test_a_second_thread_waits_for_the_scan(site: Any) -> None:
    site.add(
        "acme",
        "import time, sys\nsys.acme_imports = getattr(sys, 'acme_imports', 0) + 1\ntime.sleep(0.3)\n"
        + site.accelerator("board"),
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
def test_a_manifest_that_asks_the_registry(call: str, site: Any) -> None:
    site.add("acme", f"from torchhal import registry\nregistry.{call}")
    with isolated_registry(distributions=site.distributions()) as registry:
        (record,) = registry.plugins()
        assert record.status == "broken"
        assert f"{call} was called by a plugin's manifest" in record.reason
        assert registry.find("accelerator", "cpu")


def test_a_manifest_that_registers(site: Any) -> None:
    site.add("acme", "import torchhal\ntorchhal.register('precision', 'mine', object)")
    with isolated_registry(distributions=site.distributions()) as registry:
        (record,) = registry.plugins()
    assert "it contributes what torchhal_precisions() returns" in record.reason


def test_a_failure_is_kept_until_refresh(site: Any) -> None:
    site.add("acme", "raise OSError('first')")
    registry = site.registry()
    for _ in range(2):
        with pytest.raises(UnknownAliasError, match=r"plugin 'acme' \(acme 1.0\) is broken: OSError: first"):
            registry.find("accelerator", "board")
        (site.folder / "acme_manifest.py").write_text(site.HEADER + site.accelerator("board"))
    registry.refresh()
    assert registry.find("accelerator", "board")


def test_a_plugin_installed_meanwhile(site: Any) -> None:
    registry = site.registry()
    with pytest.raises(UnknownAliasError) as caught:
        registry.find("accelerator", "board")
    assert "refresh()" not in str(caught.value)
    site.add("acme", site.accelerator("board"))
    with pytest.raises(UnknownAliasError, match=r"torchhal\.registry\.refresh\(\)"):
        registry.find("accelerator", "board")
    registry.refresh()
    assert registry.find("accelerator", "board")


def test_refresh_makes_python_look_at_its_folders_again(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        asked = 0

        @classmethod
        def invalidate_caches(cls) -> None:
            cls.asked += 1

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    site.registry().refresh()
    assert Finder.asked == 1


def test_scans_leave_nothing_behind(site: Any) -> None:
    for name in ("acme", "beta"):
        site.add(name, site.accelerator(f"{name}_board"))
    site.add("worse", "raise SystemExit")
    registry = site.registry()

    def left() -> tuple[int, int, int]:
        return len(os.listdir("/dev/fd")), threading.active_count(), len(sys.modules)

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


def test_unknown_alias_lists_plugins(site: Any) -> None:
    """The error for an unknown alias lists what exists and what failed."""
    site.add("acme", site.accelerator("board"))
    site.add("beta", "raise SystemExit(3)")
    site.add("gamma", site.accelerator("gear"), requires=["torchhal<0.0.1"])
    site.add("delta", site.accelerator("disc"))
    text = message(site.registry(TORCHHAL_DISABLE_PLUGINS="delta"), "accelerator", "bord")
    assert "no accelerator is called 'bord'; there are 'board', 'cpu'" in text
    assert "did you mean 'board'?" in text
    assert "plugin 'beta' (beta 1.0) is broken: SystemExit: 3" in text
    assert "plugin 'gamma' (gamma 1.0) is incompatible: it requires torchhal<0.0.1" in text
    assert "plugin 'delta' (delta 1.0) is disabled: TORCHHAL_DISABLE_PLUGINS names it" in text
    assert "acme" not in text


def test_an_alias_of_a_plugin_of_ours(site: Any) -> None:
    registry = site.registry()
    assert "'TPU' comes with torchhal-xla: pip install torchhal-xla" in message(registry, "accelerator", "TPU")
    assert "did you mean 'tpu'? (pip install torchhal-xla)" in message(registry, "accelerator", "tpux")
    assert "pip install" not in message(registry, "precision", "tpux")


def test_no_install_hint_for_what_is_installed(site: Any) -> None:
    site.add("torchhal-xla", "raise OSError('libtpu')")
    text = message(site.registry(), "accelerator", "tpu")
    assert "pip install" not in text
    assert "is broken: OSError: libtpu" in text


def test_an_alias_of_another_kind(site: Any) -> None:
    assert "'ddp' is the alias of a part of another kind: strategy" in message(site.registry(), "accelerator", "ddp")


def test_auto_is_no_alias(site: Any) -> None:
    assert "'auto' is no alias" in message(site.registry(), "accelerator", "auto")


@pytest.mark.parametrize(
    "alias", ["", "/", "/cpu", "nobody/cpu", "a/b/cpu", "torchhal/board", "user/cpu", "acme/", "c pu"]
)
def test_aliases_of_nothing(alias: str, site: Any) -> None:
    site.add("acme", site.accelerator("board"))
    assert repr(alias) in message(site.registry(), "accelerator", alias)


def test_wrong_questions(site: Any) -> None:
    registry = site.registry()
    with pytest.raises(ValueError, match=r"'kind' must be one of 'accelerator', .*got 'accelerators'"):
        registry.find("accelerators", "cpu")
    with pytest.raises(ValueError, match="'kind' must be"):
        registry.aliases("x")
    with pytest.raises(TypeError, match="'alias' must be a str"):
        registry.find("accelerator", 3)  # type: ignore[arg-type]
    assert issubclass(UnknownAliasError, (LookupError, PluginError))
