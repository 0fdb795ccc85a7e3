"""GEN: hooks, aliases, targets and signatures of a plugin's components."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import typing
from collections.abc import Iterator

from torchhal.registry._entry import BASES, resolve_target
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._plugin_facts import discovery_facts, plugin_record, require_loaded


@check("GEN-06")
def aliases(context: CheckContext) -> None:
    """Every alias is a slug, one of its kind in the plugin, and none of the core's own.

    Why: a plugin that takes the name of another component decides by its mere presence what a script means.
    Fix: choose names of your own; `dist/alias` tells plugins with one name apart.
    """
    if context.component.plugin is None:
        problem = context.component.entry.component.problem(context.component.kind)
        require(not problem, str(problem))
        return
    problems = [entry.problem for entry in plugin_record(context).components if entry.problem]
    require(not problems, "; ".join(problems))
    record = plugin_record(context)
    require(record.status == "loaded", f"the plugin is {record.status}: {record.reason}")


@check("GEN-07")
def target(context: CheckContext) -> None:
    """The record's target is a concrete subclass of its kind's contract, defined in the plugin's own package.

    Why: a wrong path or a method left abstract is found by the first user instead of the author.
    Fix: correct "module:Class", define what is abstract; subclass a class of another package to publish it.
    """
    cls = context.component.cls  # raises ComponentError with the reason
    base = resolve_target(BASES[context.component.kind])
    require(issubclass(cls, base) and not inspect.isabstract(cls), f"{cls!r} is no concrete {base.__name__}")
    if context.component.plugin is not None:
        package = discovery_facts(context)["manifest"].partition(".")[0]
        home = cls.__module__.partition(".")[0]
        require(home == package, f"{cls.__qualname__} is defined in {home!r}, the plugin's package is {package!r}")


@check("GEN-08")
def known_hooks(context: CheckContext) -> None:
    """Every function of the manifest that is marked as a hook implements a hook that exists.

    Why: a misspelt hook is never called, and nothing says so.
    Fix: take the name from torchhal.plugin.HOOKS.
    """
    facts = discovery_facts(context)
    unknown = sorted(name for name, hook in facts["hooks"].items() if not hook["known"])
    require(not unknown, f"the manifest implements hooks that don't exist: {', '.join(unknown)}")
    require_loaded(facts)


@check("GEN-09")
def hook_arguments(context: CheckContext) -> None:
    """A hook's implementation takes no argument that the hook doesn't have, not even one with a default.

    Why: it would never be passed, and a later core may pass something else under that name.
    Fix: remove the argument.
    """
    facts = discovery_facts(context)
    for name, hook in facts["hooks"].items():
        extra = hook["unknown arguments"]
        require(not extra, f"{name} takes {', '.join(map(repr, extra))}, which the hook doesn't pass")


@check("GEN-10", after=("GEN-07",))
def signatures(context: CheckContext) -> None:
    """An override takes every argument of the contract's method, requires no other, and returns what it promises.

    So it is no coroutine, which returns before it has done anything.

    Why: the core calls components by the contract; a narrower override fails on the call that nobody tried.
    Fix: keep the contract's parameters, in order and by name; give new ones a default; define it without ``async``.
    """
    cls, base = context.component.cls, resolve_target(BASES[context.component.kind])
    problems = [problem for name in dir(base) for problem in _narrowed(cls, base, name)]
    require(not problems, "; ".join(problems))


def _narrowed(cls: type, base: type, name: str) -> Iterator[str]:
    ours, theirs = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
    ours, theirs = getattr(ours, "__func__", ours), getattr(theirs, "__func__", theirs)
    if name.startswith("_") or ours is theirs or not inspect.isfunction(theirs):
        return
    if not callable(ours):
        yield f"{name} is a {type(ours).__name__}, the contract has a method"
        return
    if inspect.iscoroutinefunction(ours) and not inspect.iscoroutinefunction(theirs):
        yield f"{name}() is a coroutine, which nobody awaits"
    try:
        mine, given = inspect.signature(ours), inspect.signature(theirs)
    except (TypeError, ValueError):
        return
    names = {p.name for p in mine.parameters.values()}
    kinds = {p.kind for p in mine.parameters.values()}
    for place, parameter in enumerate(given.parameters.values()):
        by_keyword = parameter.name in names or parameter.VAR_KEYWORD in kinds
        if parameter.kind is parameter.KEYWORD_ONLY and not by_keyword:
            yield f"{name}() doesn't take {parameter.name!r}"
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and place:
            if not by_keyword and parameter.VAR_POSITIONAL not in kinds:
                yield f"{name}() doesn't take {parameter.name!r}"
            elif (
                parameter.name in names
                and parameter.VAR_POSITIONAL not in kinds
                and list(mine.parameters).index(parameter.name) != place
            ):
                yield f"{name}() takes {parameter.name!r} at another place"
            left_out = parameter.default is not parameter.empty
            if left_out and parameter.name in names and mine.parameters[parameter.name].default is parameter.empty:
                yield f"{name}() asks for {parameter.name!r}, which the contract leaves out"
    for parameter in mine.parameters.values():
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.name not in given.parameters and parameter.default is parameter.empty and not variable:
            yield f"{name}() asks for {parameter.name!r}, which the contract doesn't pass"
    try:
        mine_returns, promised = typing.get_type_hints(ours).get("return"), typing.get_type_hints(theirs).get("return")
    except Exception:  # names that only a type checker sees
        return
    if isinstance(promised, type) and isinstance(mine_returns, type) and not issubclass(mine_returns, promised):
        yield f"{name}() returns {mine_returns.__name__}, the contract promises {promised.__name__}"


@check("GEN-11", after=("GEN-07",))
def defaults(context: CheckContext) -> None:
    """The record's defaults fit the constructor, and the component is made from them alone.

    Why: an alias that can't be turned into an object is found when a user's job starts.
    Fix: correct Component.defaults, or give the constructor's other arguments defaults.
    """
    made = context.create()
    require(isinstance(made, context.component.cls), f"the constructor made a {type(made).__name__}")


@check("GEN-19", after=("GEN-11",))
def pickles(context: CheckContext) -> None:
    """The class and an instance that was not started pickle, and another process can unpickle them.

    Changed: there is no config of a component beside its constructor's arguments, which its instance carries.

    Why: workers started by spawn get the strategy with its components by pickle; a lock or a lambda in one ends the
    launch.
    Fix: make handles when they are first needed, and drop them in __getstate__.
    """
    made = context.create()
    if context.component.plugin is None and context.component.entry.plugin == "user":
        module = sys.modules.get(type(made).__module__)
        if getattr(module, type(made).__name__, None) is not type(made):
            raise NotApplicable("its class stands in no module that could be imported")
    try:
        data = pickle.dumps((type(made), made))
        cls, copy = pickle.loads(data)
    except Exception as error:
        raise CheckFailed(f"it doesn't survive pickle ({type(error).__name__}: {error})") from error
    require(cls is type(made) and type(copy) is cls, f"unpickled as {cls!r} and a {type(copy).__name__}")
    if os.name == "posix" and context.component.entry.plugin != "user":
        same("the class in another process", context.run_in_subprocess(_class_name, data), cls.__qualname__)


def _class_name(data: bytes) -> str:
    cls, copy = pickle.loads(data)
    assert type(copy) is cls
    return str(cls.__qualname__)
