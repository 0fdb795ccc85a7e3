"""Test how a distribution's metadata names the packages whose classes it adapts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from torchhal.errors import AmbiguousAliasError, PluginError

MANIFEST = """
@hookimpl
def torchhal_model_adapters():
    return [Component("{alias}", "nowhere:Adapter")]
"""


def add(site: Any, name: str, package: str, manifest: str = MANIFEST) -> None:
    """Add a distribution that adapts the classes of ``package``."""
    entry_points = f"[torchhal]\n{name} = {name}_manifest\n[torchhal.adapt]\n{package} = {name}\n"
    site.add(name, manifest.format(alias=name), entry_points=entry_points)


def test_metadata_names_the_package_of_the_classes(site: Any) -> None:
    """Nothing is imported for classes of other packages, and one adapter for a package."""
    add(site, "one", "acme")
    add(site, "other", "elsewhere")
    registry = site.registry()
    assert registry.adapter_of({"acme", "torch"}).qualified_name == "one/one"
    assert "one_manifest" in sys.modules and "other_manifest" not in sys.modules
    assert registry.adapter_of({"nobodys"}) is None
    add(site, "third", "acme")
    with pytest.raises(AmbiguousAliasError, match=r"classes of acme are adapted by 2 plugins, one/one and third"):
        site.registry().adapter_of({"acme"})


def test_a_manifest_that_is_broken_is_said(site: Any) -> None:
    add(site, "ill", "acme", "raise OSError('no')")
    with pytest.raises(PluginError, match=r"classes of acme need a model adapter, and .*ill"):
        site.registry().adapter_of({"acme"})


def test_an_alias_that_the_distribution_lacks_is_reported(site: Any) -> None:
    site.add(
        "acme", MANIFEST.format(alias="acme"),
        entry_points="[torchhal]\nacme = acme_manifest\n[torchhal.adapt]\nacme = other\n",
    )  # fmt: skip
    (problem,) = site.records()["acme"].problems
    assert "acme = other in [torchhal.adapt]" in problem
    assert "the distribution has no model adapter 'other' that can be used (it has 'acme')" in problem


def test_aliases_are_those_of_the_distribution_that_declares_them(site: Any) -> None:
    """One alias in two distributions is no ambiguity where each adapts a package of its own."""
    for name, package in (("first", "acme"), ("second", "elsewhere")):
        entry_points = f"[torchhal]\n{name} = {name}_manifest\n[torchhal.adapt]\n{package} = same\n"
        site.add(name, MANIFEST.format(alias="same"), entry_points=entry_points)
    assert site.registry().adapter_of({"acme"}).qualified_name == "first/same"
    assert site.registry().adapter_of({"elsewhere"}).qualified_name == "second/same"
