"""GEN: a plugin costs nothing to look at, changes nothing by being installed, and says what is missing."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import importlib_metadata
import torch

from torchhal import registry
from torchhal.errors import ComponentError, TorchhalError
from torchhal.registry._discovery import canonical
from torchhal.registry._entry import BASES, resolve_target
from torchhal.registry._plugin_loader import PluginRecord
from torchhal_conformance import _discovery_probe as discovery_probe
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import CheckFailed, MissingRequirement, NotApplicable, check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance._torch_globals import torch_state

HEAVY: Final = frozenset({"torch", "numpy", "scipy", "pandas", "lightning", "tensorflow", "jax"})
MANIFEST_MS: Final = 50.0
_ENVIRON: Final = dict(os.environ)  # as it was before any plugin was looked for


def _plugin(bench: CheckContext) -> PluginRecord:
    record = bench.subject.plugin
    if record is None:
        raise NotApplicable("the part comes from no plugin")
    return record


def _facts(bench: CheckContext) -> dict[str, Any]:
    """What discovering the plugin does in a fresh Python; measured once per plugin."""
    record = _plugin(bench)
    facts: dict[str, Any] = json.loads(_measure(record.distribution, record.name, tuple(sys.path)))
    return facts


@functools.lru_cache(maxsize=16)
def _measure(distribution: str, plugin: str, path: tuple[str, ...]) -> str:
    folders = json.dumps([os.path.abspath(folder) for folder in path])
    # pytest's variables and torchhal's own lists are this process's affair; what a manifest has set here is what the
    # fresh process must not have yet
    environ = {name: value for name, value in _ENVIRON.items() if not name.startswith(("TORCHHAL_", "PYTEST_"))}
    environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "facts.json")
        script = os.path.abspath(discovery_probe.__file__)
        done = subprocess.run(
            [sys.executable, "-s", script, target, folders, distribution, plugin],
            capture_output=True, text=True, check=False, timeout=120, env=environ,
        )  # fmt: skip
        if done.returncode or not os.path.exists(target):
            raise CheckFailed(f"discovery of {plugin!r} ended its process with code {done.returncode}:\n{done.stderr}")
        return Path(target).read_text(encoding="utf-8")


def _loaded(facts: dict[str, Any]) -> None:
    record = facts["record"]
    require(record["status"] == "loaded", f"the plugin is {record['status']}: {record['reason']}")


@check("GEN-01")
def light_manifest(bench: CheckContext) -> None:
    """Importing the manifest imports no torch, numpy or vendor's library, and takes less than 50 ms.

    Why: every `torchhal plugins` and every unknown alias imports all manifests; seconds each make people uninstall.
    Fix: let the manifest import torchhal.plugin and nothing else; targets are strings.
    """
    facts = _facts(bench)
    _loaded(facts)
    vendors = {module for entry in _plugin(bench).components for module in entry.component.requires}
    heavy = sorted(set(facts["modules"]) & (HEAVY | vendors))
    require(not heavy, f"importing the manifest imported {', '.join(heavy)}")
    # a machine under load may be slow once
    times = [facts["record"]["load_ms"]]
    while min(times) >= MANIFEST_MS and len(times) < 3:
        _measure.cache_clear()
        times.append(_facts(bench)["record"]["load_ms"])
    require(min(times) < MANIFEST_MS, f"importing the manifest took {min(times):.0f} ms, allowed {MANIFEST_MS:.0f}")


@check("GEN-02", needs=["posix"])
def fork_after_discovery(bench: CheckContext) -> None:
    """After discovery and every availability probe, a forked child can allocate on the device.

    Why: notebooks and data loaders fork; a driver that a probe has initialised is dead in the child.
    Fix: answer availability() from metadata, files or a library's query that opens no context.
    """
    if bench.subject.kind != "accelerator":
        raise NotApplicable("the part is no accelerator")
    bench.fresh()
    try:
        code = bench.elsewhere(_fork_and_allocate, bench.subject)
    finally:
        bench.fresh()
    if isinstance(code, str):
        raise MissingRequirement(code)
    same("exit code of a forked child that allocates on the device", code, 0)


def _fork_and_allocate(subject: ComponentUnderTest) -> int | str:
    for kind in BASES:
        for entry in registry.entries(kind):
            if entry.availability() and kind in ("accelerator", "cluster_environment"):
                try:
                    part = entry.load()
                    part.availability() if kind == "accelerator" else part.detect()
                except TorchhalError:
                    pass
    state = subject.part.availability()
    if not state:
        return str(state.reason)
    child = os.fork()
    if not child:
        code = 1
        try:
            accelerator = subject.make_accelerator()
            device = accelerator.get_parallel_devices([0])[0]
            accelerator.setup_device(device)
            code = 0 if float(torch.ones(3, device=device).sum()) == 3.0 else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@check("GEN-03")
def no_side_effects(bench: CheckContext) -> None:
    """Discovery leaves the environment, sys.path, warnings filters, signal handlers, root logger, random states,
    default dtype and device and the number of threads as they were, and puts nothing strange into sys.modules.

    Why: a plugin that is merely installed must not change a program that doesn't use it.
    Fix: move such code from the package's __init__ and manifest into the part's set-up.
    """
    facts = _facts(bench)
    require(not facts["changed"], "discovery changed " + "; ".join(facts["changed"]))
    strange = facts["strange modules"]
    require(not strange, f"sys.modules has entries that are not the modules of their names: {', '.join(strange)}")
    if os.name == "posix":
        bench.fresh()
        changed = bench.elsewhere(_torch_changes, _plugin(bench).distribution)
        bench.fresh()
        require(not changed, "discovery changed torch's " + ", ".join(changed))


def _torch_changes(distribution: str) -> list[str]:
    installed: Any = importlib_metadata.distribution(distribution)
    alone = registry.Registry(distributions=lambda: [installed], environ={})  # what a neighbour changes is not its
    before, state = torch_state(), torch.get_rng_state()
    alone.plugins()
    after = torch_state()
    if not torch.equal(torch.get_rng_state(), state):
        return ["random state"]
    return [name for name in before if before[name] != after[name]]


class _Hidden:
    """A finder that doesn't find the modules of some names."""

    def __init__(self, finder: Any, names: frozenset[str]) -> None:
        self.finder, self.names = finder, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def _vendors(bench: CheckContext) -> tuple[str, ...]:
    requires = bench.subject.entry.component.requires
    if not requires:
        raise NotApplicable("its record requires no vendor's module")
    return requires


@check("GEN-04", needs=["posix"])
def without_vendor(bench: CheckContext) -> None:
    """Without the vendor's modules the plugin is loaded, its parts are listed, and the part is unavailable with a
    reason that names the missing module.

    Why: users install the plugin first and the SDK later; "No module named ..." from discovery says neither.
    Fix: import the vendor inside the part's methods, and name its modules in Component.requires.
    """
    _plugin(bench)
    vendors = _vendors(bench)
    bench.fresh()
    status, listed, ok, reason = bench.elsewhere(_look_without, bench.subject, vendors)
    bench.fresh()
    require(status == "loaded", f"without {', '.join(vendors)} the plugin is {status}")
    require(listed, "without its vendor's modules the part is not listed")
    require(not ok, "without its vendor's modules the part says that it is available")
    require(any(name in reason for name in vendors), f"the reason must name {' or '.join(vendors)} (got {reason!r})")


def _look_without(subject: ComponentUnderTest, vendors: tuple[str, ...]) -> tuple[str, bool, bool, str]:
    _must_be_absent(vendors)
    sys.meta_path[:] = [_Hidden(finder, frozenset(vendors)) for finder in sys.meta_path]
    entry = registry.find(subject.kind, subject.looked_up_as)
    record = next(one for one in registry.plugins() if one.name == entry.plugin)
    state = entry.availability()
    if state and subject.kind == "accelerator":
        state = entry.load().availability()
    return record.status, entry in record.components, state.ok, state.reason


def _must_be_absent(vendors: tuple[str, ...]) -> None:
    if there := [name for name in vendors if name in sys.modules]:
        raise MissingRequirement(f"{', '.join(there)} comes with torch here, so it can't be taken away")


@check("GEN-05", needs=["posix"])
def broken_vendor(bench: CheckContext) -> None:
    """With a vendor's module whose import raises OSError, RuntimeError or AttributeError an accelerator is unavailable
    with that as the reason; a part of another kind loads, or is refused with it.

    Why: half-installed SDKs are the rule, and their errors surfaced as crashes of programs that never used them.
    Fix: import the vendor in load() and let Accelerator.availability() catch what comes.
    """
    _plugin(bench)
    vendors = _vendors(bench)
    for error in ("OSError", "RuntimeError", "AttributeError"):
        bench.fresh()
        state = bench.elsewhere(_look_at_broken, bench.subject, vendors, error, str(bench.folder / error))
        bench.fresh()
        if state is None:
            continue
        ok, reason = state
        require(not ok, f"with a vendor's module that raises {error} the part says that it is available")
        require("half installed" in reason, f"the reason must hold the vendor's {error} (got {reason!r})")


def _look_at_broken(
    subject: ComponentUnderTest, vendors: tuple[str, ...], error: str, folder: str
) -> tuple[bool, str] | None:
    _must_be_absent(vendors)
    for name in vendors:
        package = Path(folder, name)
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise {error}('half installed')\n")
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    entry = registry.find(subject.kind, subject.looked_up_as)
    if subject.kind != "accelerator":
        try:
            entry.load()
        except ComponentError as refused:
            return False, str(refused)
        return None
    state = entry.load().availability()
    return state.ok, state.reason


@check("GEN-06")
def aliases(bench: CheckContext) -> None:
    """Every alias is a slug, one of its kind in the plugin, and none of the core's own.

    Why: a plugin that takes the name of another part decides by its mere presence what a script means.
    Fix: choose names of your own; `dist/alias` tells plugins with one name apart.
    """
    if bench.subject.plugin is None:
        problem = bench.subject.entry.component.problem(bench.subject.kind)
        require(not problem, str(problem))
        return
    problems = [entry.problem for entry in _plugin(bench).components if entry.problem]
    require(not problems, "; ".join(problems))
    record = _plugin(bench)
    require(record.status == "loaded", f"the plugin is {record.status}: {record.reason}")


@check("GEN-07")
def target(bench: CheckContext) -> None:
    """The record's target is a concrete subclass of its kind's contract, defined in the plugin's own package.

    Why: a wrong path or a method left abstract is found by the first user instead of the author.
    Fix: correct "module:Class", define what is abstract; subclass a class of another package to publish it.
    """
    part = bench.subject.part  # raises ComponentError with the reason
    base = resolve_target(BASES[bench.subject.kind])
    require(issubclass(part, base) and not inspect.isabstract(part), f"{part!r} is no concrete {base.__name__}")
    if bench.subject.plugin is not None:
        package = _facts(bench)["manifest"].partition(".")[0]
        home = part.__module__.partition(".")[0]
        require(home == package, f"{part.__qualname__} is defined in {home!r}, the plugin's package is {package!r}")


@check("GEN-08")
def known_hooks(bench: CheckContext) -> None:
    """Every function of the manifest that is marked as a hook implements a hook that exists.

    Why: a misspelt hook is never called, and nothing says so.
    Fix: take the name from torchhal.plugin.HOOKS.
    """
    facts = _facts(bench)
    unknown = sorted(name for name, hook in facts["hooks"].items() if not hook["known"])
    require(not unknown, f"the manifest implements hooks that don't exist: {', '.join(unknown)}")
    _loaded(facts)


@check("GEN-09")
def hook_arguments(bench: CheckContext) -> None:
    """A hook's implementation takes no argument that the hook doesn't have, not even one with a default.

    Why: it would never be passed, and a later core may pass something else under that name.
    Fix: remove the argument.
    """
    facts = _facts(bench)
    for name, hook in facts["hooks"].items():
        extra = hook["unknown arguments"]
        require(not extra, f"{name} takes {', '.join(map(repr, extra))}, which the hook doesn't pass")


@check("GEN-10")
def signatures(bench: CheckContext) -> None:
    """An override takes every argument that the contract's method takes, asks for no other, and returns what it
    promises.

    Why: the core calls parts by the contract; a narrower override fails on the call that nobody tried.
    Fix: keep the contract's parameters, in order and by name; give new ones a default.
    """
    part, base = bench.subject.part, resolve_target(BASES[bench.subject.kind])
    problems = [problem for name in dir(base) for problem in _narrowed(part, base, name)]
    require(not problems, "; ".join(problems))


def _narrowed(part: type, base: type, name: str) -> Iterator[str]:
    ours, theirs = inspect.getattr_static(part, name), inspect.getattr_static(base, name)
    ours, theirs = getattr(ours, "__func__", ours), getattr(theirs, "__func__", theirs)
    if name.startswith("_") or ours is theirs or not inspect.isfunction(theirs):
        return
    if not callable(ours):
        yield f"{name} is a {type(ours).__name__}, the contract has a method"
        return
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


@check("GEN-11")
def defaults(bench: CheckContext) -> None:
    """The record's defaults fit the constructor, and the part is made from them alone.

    Why: an alias that can't be turned into an object is found when a user's job starts.
    Fix: correct Component.defaults, or give the constructor's other arguments defaults.
    """
    made = bench.make()
    require(isinstance(made, bench.subject.part), f"the constructor made a {type(made).__name__}")


@check("GEN-12")
def bounded_requirement(bench: CheckContext) -> None:
    """The distribution requires torchhal with a lower and an upper bound, between which the running version lies; what
    it requires only with an extra of its own doesn't count.

    Why: a plugin without an upper bound is installed beside the next major version, and breaks there.
    Fix: dependencies = ["torchhal>=0.1,<1"].
    """
    from packaging.requirements import Requirement

    import torchhal

    found = [Requirement(text) for text in _facts(bench)["requires_dist"]]
    always = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    ours = [one for one in always if canonical(one.name) == "torchhal"]
    require(ours, "the distribution doesn't require torchhal")
    operators = {one.operator for requirement in ours for one in requirement.specifier}
    bounded = operators & {"==", "~="} or (operators & {">", ">="} and operators & {"<", "<="})
    require(bounded, f"the requirement must have a lower and an upper bound (got {', '.join(map(str, ours))})")
    version = torchhal.__version__
    inside = all(one.specifier.contains(version, prereleases=True) for one in ours)
    require(inside, f"torchhal {version} is outside of {', '.join(map(str, ours))}")


@check("GEN-13")
def repeatable(bench: CheckContext) -> None:
    """Discovery gives the same table when it is repeated, and in another process.

    Why: a hook that registers once, or by chance, gives ranks different ideas of what exists.
    Fix: return a new list of constant records from each hook.
    """
    facts = _facts(bench)
    for again in facts["components again"]:
        same("the components, asked again", again, facts["components"])
    here = [[e.kind, e.component.alias, e.component.target] for e in _plugin(bench).components]
    same("the components, in another process", facts["components"], here)


@check("GEN-14")
def disabled(bench: CheckContext) -> None:
    """A plugin that TORCHHAL_DISABLE_PLUGINS names is not imported.

    Why: the switch is there for the plugin whose import is the problem.
    Fix: nothing of the package may be imported from a .pth file or another package's __init__.
    """
    imported = _facts(bench)["imported although disabled"]
    require(not imported, f"although it is disabled, {', '.join(imported[:5])} is imported")


@check("GEN-15")
def public_names(bench: CheckContext) -> None:
    """The package's source imports no underscored module or name of torchhal, and uses none through an import.

    Why: what is private changes in any release, and the plugin is then broken for everybody at once.
    Fix: use the public name, or ask for one.
    """
    _plugin(bench)
    root = Path(_facts(bench)["record"]["file"]).parent
    problems = [f"{file.name}:{problem}" for file in sorted(root.rglob("*.py")) for problem in _private_uses(file)]
    require(not problems, "; ".join(problems[:10]))


def _private_uses(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "torchhal":
                    ours.add(name.asname or "torchhal")
                    if any(part.startswith("_") for part in name.name.split(".")):
                        yield f"{node.lineno} imports {name.name}"
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torchhal" and not node.level
        ):
            for name in node.names:
                ours.add(name.asname or name.name)
                if any(_is_private(part) for part in [*(node.module or "").split("."), name.name]):
                    yield f"{node.lineno} imports {node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            inner = node.value
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in ours:
                yield f"{node.lineno} uses {ast.unparse(node)}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@check("GEN-16", needs=["posix"])
def no_patching(bench: CheckContext) -> None:
    """Loading the plugin's classes rebinds no attribute of torchhal, torch and torch.distributed, nn and optim.

    Why: a patch acts on every user of the process, and two plugins that patch one place depend on their order.
    Fix: subclass and override; where that can't be done, patch in the part's set-up and restore in its teardown.
    """
    record = _plugin(bench)
    bench.fresh()
    rebound = bench.elsewhere(_rebound_by_loading, record.distribution)
    bench.fresh()
    require(not rebound, f"loading the classes rebound {', '.join(rebound[:8])}")


def _rebound_by_loading(distribution: str) -> list[str]:
    owners: list[Any] = [
        torch,
        torch.distributed,
        torch.nn,
        torch.optim,
        torch.Tensor,
        torch.nn.Module,
        torch.optim.Optimizer,
    ]
    owners += [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torchhal"]
    owners += [resolve_target(target) for target in BASES.values()]
    before = [(owner, dict(vars(owner))) for owner in owners]
    for kind in BASES:
        for entry in registry.entries(kind):
            if entry.distribution == distribution and entry.availability():
                try:
                    entry.load()
                except ComponentError:
                    pass
    rebound = []
    for owner, names in before:
        now = vars(owner)
        label = getattr(owner, "__name__", repr(owner))
        changed = {name: now.get(name) for name, value in names.items() if now.get(name) is not value}
        changed = {name: value for name, value in changed.items() if not _made_by_torch(value)}
        rebound += [f"{label}.{name}" for name in changed if not name.startswith("__")]
    # the registry's own records of what was found
    return [name for name in rebound if not name.startswith("torchhal_conformance")]


def _made_by_torch(value: Any) -> bool:
    """Whether a function stands in torch's own files: importing more of torch wraps some of its functions."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.dirname(torch.__file__) + os.sep)


@check("GEN-17", features=["wheel"], timeout=120)
def wheel(bench: CheckContext) -> None:
    """A wheel built from the source holds the same components, py.typed, a licence, a summary and a URL.

    Changed: the wheel is unpacked into a folder of its own, not installed into a new environment, which would need an
    index for torch.

    Why: an entry point or a data file that is missing from the wheel works for the author and for nobody else.
    Fix: name the package in the build backend's configuration and fill in [project].
    """
    record = _plugin(bench)
    source = bench.subject.source
    if source is None:
        raise MissingRequirement("its source is not here: install the plugin with pip install --editable")
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--wheel-dir", str(bench.folder), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = list(bench.folder.glob("*.whl"))
    require(build.returncode == 0 and wheels, f"the wheel could not be built:\n{build.stderr[-2000:]}")
    site = bench.folder / "site"
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(site)
    package = _facts(bench)["manifest"].partition(".")[0]
    metadata: Any = importlib.metadata.PathDistribution(next(site.glob("*.dist-info"))).metadata
    require((site / package / "py.typed").exists(), f"the wheel has no {package}/py.typed")
    for names in (("License-Expression", "License", "License-File"), ("Summary",), ("Project-URL", "Home-page")):
        require(any(metadata.get(name) for name in names), f"the wheel's metadata has no {' or '.join(names)}")
    others = tuple(folder for folder in sys.path if not (Path(folder or ".") / package).is_dir())
    found = json.loads(_measure(record.distribution, record.name, (str(site), *others)))
    same("the components that the wheel gives", found["components"], _facts(bench)["components"])


@check("GEN-18")
def beside_a_twin(bench: CheckContext) -> None:
    """Beside another plugin with the same aliases each is ambiguous, and both qualified names find their part.

    Why: where the winner depends on the order of folders, one script means different hardware on two machines.
    Fix: give records that can be used; the look-up itself is the core's.
    """
    problems = _facts(bench)["beside a twin"]
    require(not problems, "; ".join(problems))


@check("GEN-19")
def pickles(bench: CheckContext) -> None:
    """The class and an instance that was not started pickle, and another process can unpickle them.

    Changed: there is no config of a part beside its constructor's arguments, which its instance carries.

    Why: workers started by spawn get the strategy with its parts by pickle; a lock or a lambda in one ends the launch.
    Fix: make handles when they are first needed, and drop them in __getstate__.
    """
    made = bench.make()
    if bench.subject.plugin is None and bench.subject.entry.plugin == "user":
        module = sys.modules.get(type(made).__module__)
        if getattr(module, type(made).__name__, None) is not type(made):
            raise NotApplicable("its class stands in no module that could be imported")
    try:
        data = pickle.dumps((type(made), made))
        part, copy = pickle.loads(data)
    except Exception as error:
        raise CheckFailed(f"it doesn't survive pickle ({type(error).__name__}: {error})") from error
    require(part is type(made) and type(copy) is part, f"unpickled as {part!r} and a {type(copy).__name__}")
    if os.name == "posix" and bench.subject.entry.plugin != "user":
        same("the class in another process", bench.elsewhere(_class_name, data), part.__qualname__)


def _class_name(data: bytes) -> str:
    part, copy = pickle.loads(data)
    assert type(copy) is part
    return str(part.__qualname__)


@check("GEN-20")
def no_network(bench: CheckContext) -> None:
    """Discovery opens no connection, resolves no name and starts no process.

    Why: login nodes without a network hang, and an `srun` at import starts a job step.
    Fix: ask such questions in availability() or later, and from files where there are any.
    """
    events = _facts(bench)["events"]
    require(not events, f"discovery did {'; '.join(events[:5])}")


@check("GEN-21")
def no_leak(bench: CheckContext) -> None:
    """A hundred scans and look-ups leave no more file descriptors, threads and modules than one does.

    Why: services look parts up for every request.
    Fix: open nothing in a hook.
    """
    growth = _facts(bench)["growth"]
    told = ", ".join(f"{count} {what}" for what, count in growth.items())
    require(not growth, f"{discovery_probe.SCANS} scans left {told} more than one")


@check("GEN-22")
def quiet_manifest(bench: CheckContext) -> None:
    """The manifest neither ends the process nor prints, to stdout or stderr.

    Changed: that `torchhal plugins --json` can be parsed beside it follows from this, and isn't asked by itself.

    Why: a sys.exit() at import ended users' jobs, and a banner on stdout breaks every tool that reads it.
    Fix: remove both; a manifest that can't work on a machine says so by Component.requires or availability().
    """
    facts = _facts(bench)
    _loaded(facts)
    require(not facts["printed"], f"discovery printed {facts['printed'][:200]!r}")
