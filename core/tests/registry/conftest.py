"""Distributions on disk for the tests of the registry."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

from torchhal.registry import PluginRecord, Registry


class Site:
    """A folder as pip leaves it: modules with their dist-info beside them."""

    HEADER = "from torchhal.plugin import Component, hookimpl\n"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            (self.folder / f"{stem}_manifest.py").write_text(self.HEADER + textwrap.dedent(manifest))
        if entry_points is None:
            entry_points = f"[torchhal]\n{stem} = {stem}_manifest\n"
        if metadata is None:
            lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
            metadata = "\n".join(["Metadata-Version: 2.1", *lines, "", "A description."])
        for file, content in (("entry_points.txt", entry_points), ("METADATA", metadata)):
            if content:
                (dist_info / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return dist_info

    @staticmethod
    def accelerator(alias: str, **fields: object) -> str:
        """The source of a manifest with one accelerator."""
        more = "".join(f", {name}={value!r}" for name, value in fields.items())
        return f"@hookimpl\ndef torchhal_accelerators():\n    return [Component({alias!r}, 'nowhere:Class'{more})]\n"

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
