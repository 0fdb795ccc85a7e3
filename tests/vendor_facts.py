"""Hold a plugin and its stub to the tables of facts about the vendor's API (``plugins/*/facts``).

A stub has the vendor's names and signatures (:func:`compare`), and the plugin uses no others (:func:`uses` and
:func:`check`). How the tables are made: ``vendor_sources.py``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

Table = dict[str, dict[str, str]]
"""``{module: {name: signature}}``."""

Use = tuple[str, str | None, "ast.Call | None"]
"""Module, name below it (None: the module itself), and the call where it is called."""

_NOT_CALLED = ("(property)", "(attribute)")


def table(folder: Path) -> Table:
    """The facts of all ``.tsv`` files in ``folder``."""
    known: Table = {}
    for file in sorted(folder.glob("*.tsv")):
        for line in file.read_text().splitlines():
            module, name, signature, _ = line.split("\t")
            known.setdefault(module, {})[name] = signature
    return known


def arguments(signature: str) -> tuple[ast.arguments | None, bool]:
    """``ast.arguments`` of a signature, and whether there are more than it says; (None, True) for an unknown one."""
    if signature == "(?)":
        return None, True
    more = signature.endswith(", ...)")
    (function,) = ast.parse(f"def f{signature.replace(', ...)', ')')}: pass").body
    assert isinstance(function, ast.FunctionDef)
    return function.args, more


# -- the stub ------------------------------------------------------------------------------------------------


def parameters(function: Any, roots: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of each parameter, annotations left out. A default that is an object of ``roots``, and no
    number, is the name of its class."""

    def plain(default: Any) -> Any:
        own = type(default).__module__.partition(".")[0] in roots and not isinstance(default, int)
        return type(default).__name__ if own else default

    return [(p.name, p.kind, plain(p.default)) for p in inspect.signature(function).parameters.values()]


def expected(signature: str, scope: Mapping[str, Any], roots: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """:func:`parameters` of a signature of the table; ``scope``: what the names in its defaults stand for."""
    names = dict(scope)
    exec(f"def f{signature}: pass", names)
    return parameters(names["f"], roots)


def offered(module: ModuleType, roots: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(name, thing) of what a module of the stub offers, methods too: all that is in a package, and what a module
    defines itself."""
    for name, thing in vars(module).items():
        if name.startswith("_") or not (inspect.isfunction(thing) or inspect.isclass(thing)):
            continue
        own = thing.__module__.partition(".")[0] in roots
        if not own or (not hasattr(module, "__path__") and thing.__module__ != module.__name__):
            continue
        yield name, thing
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            wrapped = isinstance(function, (staticmethod, classmethod, property))
            if not method.startswith("_") and (wrapped or inspect.isfunction(function)):
                yield f"{name}.{method}", function


def compare(
    known: Table, module: ModuleType, roots: Collection[str], scope: Mapping[str, Any] | None = None
) -> list[str]:
    """Raise AssertionError for what ``module`` offers and the table hasn't got, or has otherwise; what was compared.

    Args:
        known: the table.
        module: the stub's.
        roots: packages whose functions and classes are the stub's.
        scope: what names in the signatures' defaults stand for.
    """
    names, compared = known[module.__name__], []
    for path, thing in offered(module, roots):
        assert path in names, f"the stub's {module.__name__} has {path}, which the vendor's has not"
        signature = names[path]
        if isinstance(thing, property):
            assert signature in _NOT_CALLED, f"{path} is called: {signature}"
            continue
        if signature == "(?)" or (inspect.isclass(thing) and issubclass(thing, int)):
            continue
        function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        bound = "." in path and not isinstance(thing, staticmethod)
        own = parameters(function, roots)[1 if bound else 0 :]
        assert own == expected(signature, scope or {}, roots), (
            f"{module.__name__}.{path}{inspect.signature(function)}, and the vendor's is {signature}"
        )
        compared.append(f"{module.__name__}.{path}")
    return compared


# -- the plugin ----------------------------------------------------------------------------------------------


class _Uses(ast.NodeVisitor):
    def __init__(
        self, root: str, known: Table, objects: Mapping[str, tuple[str, str]], others: Collection[str]
    ) -> None:
        self.root, self.known, self.objects, self.others = root, known, objects, others
        self.modules: dict[str, str] = {}
        self.names: dict[str, tuple[str, str]] = {}
        self.found: list[Use] = []

    def take(self, node: ast.Import | ast.ImportFrom) -> None:
        """An import: it is a use, and gives names."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                if alias.name.partition(".")[0] == self.root:
                    self.found.append((alias.name, None, None))
                    self.modules[alias.asname or self.root] = alias.name if alias.asname else self.root
                continue
            module, name = node.module or "", alias.asname or alias.name
            if module.partition(".")[0] != self.root or node.level:
                continue
            if f"{module}.{alias.name}" in self.known:
                self.modules[name] = f"{module}.{alias.name}"
            else:
                self.names[name] = (module, alias.name)
                self.found.append((module, alias.name, None))

    def _use(self, node: ast.expr) -> tuple[str, str] | None:
        """Module and name that an expression such as ``a.b.c`` stands for."""
        try:
            head, *rest = _chain(node)
        except TypeError:
            return None
        before, last = [head, *rest[:-1]][-1], rest[-1] if rest else ""
        if last and before in self.objects:
            module, cls = self.objects[before]
            return None if last in self.others else (module, f"{cls}.{last}")
        if any(word in self.objects for word in [head, *rest]):
            return None  # of what it ends in nothing is known; what it begins with is looked at by itself
        if head in self.names:
            module, name = self.names[head]
            return module, ".".join([name, *rest])
        if head not in self.modules or not rest:
            return None
        module = self.modules[head]
        while len(rest) > 1 and (f"{module}.{rest[0]}" in self.known or self._is_package(f"{module}.{rest[0]}")):
            module, rest = f"{module}.{rest[0]}", rest[1:]
        return (module, ".".join(rest)) if f"{module}.{rest[0]}" not in self.known else None

    def _is_package(self, name: str) -> bool:
        return any(module.startswith(f"{name}.") for module in self.known)

    def visit_Call(self, node: ast.Call) -> None:
        if found := self._use(node.func):
            self.found.append((*found, node))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if found := self._use(node):
            self.found.append((*found, None))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.names:
            self.found.append((*self.names[node.id], None))


def _chain(node: ast.expr) -> list[str]:
    """``a.b.c`` as words; TypeError for another expression. What stands before a call or an index doesn't matter."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        base = node.value
        if isinstance(base, ast.Name | ast.Attribute):
            return [*_chain(base), node.attr]
    raise TypeError(node)


def uses(
    source: str,
    root: str,
    known: Table,
    *,
    objects: Mapping[str, tuple[str, str]] | None = None,
    others: Collection[str] = (),
) -> list[Use]:
    """What a piece of code uses of a vendor's package.

    Args:
        source: the code.
        root: the package.
        known: the table, which says what is a module.
        objects: variables and attributes that hold an object of the vendor's, with the module and name of its class.
        others: attributes of such objects that are not the vendor's, but torch's.
    """
    visitor = _Uses(root, known, objects or {}, others)
    tree = ast.parse(source)
    for node in ast.walk(tree):  # first: a function may use what another one imports and returns
        if isinstance(node, ast.Import | ast.ImportFrom):
            visitor.take(node)
    visitor.visit(tree)
    return visitor.found


def check(found: Collection[Use], known: Table) -> None:
    """Raise AssertionError for a use that the table doesn't know, or a call that doesn't fit its signature."""
    for module, name, call in found:
        assert module in known or any(each.startswith(f"{module}.") for each in known), f"no module {module}"
        if name is None:
            continue
        assert name in known.get(module, {}), f"{module} has no {name}"
        signature = known[module][name]
        if call is None:
            continue
        assert signature != "(attribute)", f"{module}.{name} isn't called"
        taken, more = arguments(signature) if signature != "(property)" else (None, True)
        if taken is None:
            continue
        names = [argument.arg for argument in [*taken.posonlyargs, *taken.args]]
        assert len(call.args) <= len(names) or taken.vararg, f"{module}.{name} takes {len(names)} arguments"
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        unknown = given - set(names) - {argument.arg for argument in taken.kwonlyargs}
        assert not unknown or more or taken.kwarg, f"{module}.{name} takes no {unknown}"
