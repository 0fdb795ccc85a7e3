"""Read a vendor's API out of its Python sources, for the tables in ``plugins/*/facts``.

Nothing of the vendor is imported or copied: what comes out are facts, one per line: module, name, signature without
annotations, file. ``(property)`` and ``(attribute)`` stand for what isn't called, ``(?)`` for a constructor of its own
that a class hasn't got. A name that a package takes from one of its modules stands there, too, as users reach it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Fact = tuple[str, str, str]
"""Name, signature, file."""


@dataclass(frozen=True)
class Sources:
    """
    Attributes:
        package: the folder that is the vendor's package.
        root: the name it is imported by.
        private: names with an underscore that are wanted all the same.
        inherit: whether methods of the vendor's own base classes stand below each class that has them.
    """

    package: Path
    root: str
    private: Collection[str] = ()
    inherit: bool = False

    def lines(self, modules: Collection[str]) -> set[str]:
        """The table's lines for these modules, named below the root; ``""`` for the root itself."""
        return {
            "\t".join([".".join(filter(None, [self.root, module])), *fact])
            for module in modules
            for fact in self._public(module)
            if not any(part.startswith("_") and part not in self.private for part in fact[0].split("."))
        }

    def _file(self, module: str) -> Path | None:
        base = self.package.joinpath(*filter(None, module.split(".")))
        found = [file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()]
        return found[0] if found else None

    def _public(self, module: str, through: tuple[str, ...] = ()) -> Iterator[Fact]:
        """What ``module`` offers; ``through``: the modules that asked, which may import each other."""
        file = self._file(module)
        assert file is not None, f"there is no module {module!r} below {self.package}"
        shown = str(Path(self.root) / file.relative_to(self.package))
        for node in parsed(file).body:
            for name, text in self._described(node):
                yield name, text, shown
            if isinstance(node, ast.ImportFrom) and file.name == "__init__.py":
                yield from self._taken(node, module, (*through, module))

    def _taken(self, node: ast.ImportFrom, package: str, through: tuple[str, ...]) -> Iterator[Fact]:
        """What a package takes from another module of the vendor's."""
        source = node.module or ""
        if node.level == 1:
            source = ".".join(filter(None, [package, source]))
        elif node.level == 0 and source.startswith(f"{self.root}."):
            source = source.removeprefix(f"{self.root}.")
        else:
            return
        if source in through or self._file(source) is None:
            return
        wanted = {alias.name: alias.asname or alias.name for alias in node.names}
        for name, text, origin in self._public(source, through):
            head, dot, rest = name.partition(".")
            if "*" in wanted and not head.startswith("_"):
                yield name, text, origin
            elif head in wanted:
                yield wanted[head] + dot + rest, text, origin

    def _described(self, node: ast.stmt) -> Iterator[tuple[str, str]]:
        """Name and signature of a function, or of a class, its methods, properties and attributes."""
        if isinstance(node, ast.FunctionDef):
            yield node.name, signature(node)
        if not isinstance(node, ast.ClassDef):
            return
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        maker = methods.get("__init__") or methods.get("__new__")
        yield node.name, signature(maker, bound=True) if maker else "(?)"
        for name in dict.fromkeys([*attributes(maker), *constants(node)]):
            yield f"{node.name}.{name}", "(attribute)"
        for name, text in _of_methods(node):
            yield f"{node.name}.{name}", text
        for base in self._bases(node) if self.inherit else ():
            for name, text in _of_methods(base):
                if name not in methods:
                    yield f"{node.name}.{name}", text

    def _bases(self, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        for base in node.bases:
            name = ast.unparse(base).rpartition(".")[2]
            for file in sorted(self.package.glob("*.py")):
                for each in parsed(file).body:
                    if isinstance(each, ast.ClassDef) and each.name == name and each is not node:
                        yield each
                        yield from self._bases(each)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _of_methods(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for each in node.body:
        if not isinstance(each, ast.FunctionDef) or each.name in ("__init__", "__new__"):
            continue
        decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
        if "property" in decorators:
            yield each.name, "(property)"
        elif not any(decorator.endswith(".setter") for decorator in decorators):
            yield each.name, signature(each, bound="staticmethod" not in decorators)


def signature(function: ast.FunctionDef, *, bound: bool = False) -> str:
    """Without annotations; ``bound``: without the first argument."""
    arguments = copy.deepcopy(function.args)
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    if bound:
        del (arguments.posonlyargs or arguments.args)[0]
    return f"({ast.unparse(arguments)})"


def attributes(maker: ast.FunctionDef | None) -> Iterator[str]:
    """What a constructor sets on ``self``, or hands to its base class by name."""
    for node in ast.walk(maker) if maker is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in [*targets, node.target] if isinstance(node, ast.AnnAssign) else targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)


def constants(node: ast.ClassDef) -> Iterator[str]:
    """What a class assigns in its body, such as the members of an enumeration."""
    for each in node.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            yield each.targets[0].id
