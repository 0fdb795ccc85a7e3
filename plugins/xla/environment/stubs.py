"""Compiles stand-ins for the shared libraries that torch's CUDA build needs to be loaded and that aren't here.

Run by the environment's own Python. A stand-in exports every symbol that torch's libraries look for in the real one,
under the version they look for; each is a function that answers "no device". ``torch.cuda.is_available()`` is then
False, as on any machine without a GPU.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice; any other library takes it for some error, too
TEXTS = ("cudaGetErrorString", "cudaGetErrorName", "ncclGetErrorString", "cudnnGetErrorString")


class Library:
    """What one shared library needs and has, as ``readelf`` shows it."""

    def __init__(self, path: Path) -> None:
        dynamic = _readelf("--dynamic", path)
        self.needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
        self.undefined: list[tuple[str, str]] = []
        """(symbol, version or "")."""
        self.defined: set[str] = set()
        for line in _readelf("--dyn-syms", path).splitlines():
            parts = line.split()
            if len(parts) < 8 or not parts[0].endswith(":"):
                continue
            binding, index, name = parts[4], parts[6], parts[7]
            symbol, _, version = name.partition("@")
            if index != "UND":
                self.defined.add(symbol)
            elif binding != "WEAK":
                self.undefined.append((symbol, version))
        self.versions: dict[str, set[str]] = defaultdict(set)
        """Library -> versions that are asked of it."""
        library = ""
        for line in _readelf("--version-info", path).splitlines():
            if match := re.search(r"Version: 1  File: (\S+)", line):
                library = match[1]
            elif (match := re.search(r"Name: (\S+)  Flags", line)) and library:
                self.versions[library].add(match[1])


def _readelf(what: str, path: Path) -> str:
    return subprocess.run(["readelf", "--wide", what, str(path)], capture_output=True, text=True, check=True).stdout


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def missing(libraries: list[Library], beside: set[str]) -> set[str]:
    """Names of libraries that are needed and lie neither ``beside`` torch's nor where the system looks."""
    names = {name for library in libraries for name in library.needed} - beside
    # the loader finds its own kind by itself: only what NVIDIA ships is ever missing
    return {name for name in names if re.match(r"lib(cu|nv|nccl)", name) and _load(name) is None}


def exports(libraries: list[Library], absent: set[str]) -> dict[str, dict[str, set[str]]]:
    """Missing library -> version (or "") -> symbols that it must have."""
    present = set().union(*(library.defined for library in libraries))
    system = [_load(name) for name in {name for library in libraries for name in library.needed} - absent]
    result: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in absent}
    for library in libraries:
        owner = {version: name for name, versions in library.versions.items() for version in versions}
        unnamed = next((name for name in library.needed if name in absent), None)
        for symbol, version in library.undefined:
            if version:
                if owner.get(version) in absent:
                    result[owner[version]][version].add(symbol)
            elif unnamed and symbol not in present and not any(hasattr(other, symbol) for other in system):
                result[unnamed][""].add(symbol)  # which library has it does not matter to the loader
    return result


def compile_stub(name: str, versions: dict[str, set[str]], folder: Path) -> None:
    """Write ``folder/name``."""
    lines = []
    for symbol in sorted(set().union(*versions.values()) if versions else ()):
        if symbol in TEXTS:
            lines.append(f'const char *{symbol}(void) {{ return "a stand-in without a device"; }}')
        else:
            lines.append(f"int {symbol}(void) {{ return {NO_DEVICE}; }}")
    nodes = [
        f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(symbols))} }};"
        for version, symbols in sorted(versions.items())
        if version
    ]
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "versions")
        source.write_text("\n".join([*lines, ""]))
        script.write_text("\n".join([*nodes, ""]))
        versioned = [f"-Wl,--version-script={script}"] if nodes else []
        output = ["-o", str(folder / name), str(source)]
        flags = ["-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{name}"]
        subprocess.run(["gcc", *flags, *versioned, *output], check=True)


def main() -> None:
    site = Path(sysconfig.get_path("platlib"))
    folder = site / "torch" / "lib"
    # libcaffe2_nvrtc, which wants a driver, is loaded where there is one
    paths = [path for path in (*folder.glob("*.so*"), *site.glob("_XLAC*.so")) if path.name != "libcaffe2_nvrtc.so"]
    libraries = [Library(path) for path in paths]
    absent = missing(libraries, {path.name for path in paths})
    for name, versions in sorted(exports(libraries, absent).items()):
        compile_stub(name, versions, folder)
    print(f"stand-ins for {', '.join(sorted(absent)) or 'nothing: all libraries are here'}")


if __name__ == "__main__":
    main()
