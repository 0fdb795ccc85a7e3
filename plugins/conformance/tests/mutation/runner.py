"""Run the kit on mutants, each in a fork with a time limit of its own, and keep the results in a cache."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torchhal_conformance
from mutation.instrument import ReachMap, instrument
from mutation.operators import Mutant
from mutation.reference import KINDS, PACKAGE, Carrier, read_sources, target, write_package
from torchhal_conformance import CHECKS, checks_for
from torchhal_conformance._fork_server import ForkServer

_PARSING: Final = threading.Lock()
"""ast.parse is not safe in two threads at once on Python 3.11: it counts its depth for all of them."""

HERE: Final = Path(__file__).resolve().parent
CACHE: Final = HERE.parents[3] / ".mutation_cache"
TAG: Final = "TORCHHAL_MUTATION_RUN"
"""In every process of one mutant's run, so that none is left."""
PATIENCE: Final = 20.0
"""Seconds in which the kit calls a check of one process a hang; its own 240 would cost more than they show."""
_MODULES: Final = ("torch._dynamo", "torchhal_conformance.checks", "torchhal_conformance._session", "torchhal.trainer")


@dataclass(frozen=True)
class Control:
    """The kit's results for the unchanged copies.

    Attributes:
        seconds: carrier -> check -> seconds, of the checks that passed.
        reached: ``file:line:column`` of a statement -> the [carrier, check] that run it.
        failed: [carrier, check, reason] of those that failed; there must be none.
    """

    seconds: dict[str, dict[str, float]]
    reached: dict[str, list[list[str]]]
    failed: list[list[str]]


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        outcome: ``killed``, ``survived``, or ``timeout`` where the kit itself reported nothing in time.
        carrier: the component whose check failed.
        check: its id; ``load`` where the class could not be imported.
        hang: whether the kit reported a hang.
        reached: the number of checks that run the changed statement.
        skipped: checks that passed without the change and were not made with it.
        seconds: of the whole run.
        reason: the first lines of the failure.
    """

    outcome: str
    carrier: str = ""
    check: str = ""
    hang: bool = False
    reached: int = 0
    skipped: tuple[str, ...] = ()
    seconds: float = 0.0
    reason: str = ""


class Runner:
    """Runs of one kind's mutants; use it in a ``with`` block."""

    def __init__(self, kind: str, *, level: str = "core", cache: Path | None = CACHE) -> None:
        self.kind, self.level = kind, level
        self.sources = read_sources(kind)
        self._cache = cache
        self._folder = Path(tempfile.mkdtemp(prefix="torchhal-mutation-"))
        self._server = ForkServer(_MODULES, {**os.environ, "OMP_NUM_THREADS": "1"})
        self._lock = threading.Lock()
        self._kit = _digest(
            *sorted(path.read_bytes() for path in Path(torchhal_conformance.__file__).parent.glob("*.py")),
            *((HERE / name).read_bytes() for name in ("run_checks.py", "prelude.py")),
        )
        self._check_digests: dict[str, str] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the unchanged copies --------------------------------------------------------------------------------

    def control(self, carriers: Iterable[str] | None = None, only: Collection[str] | None = None) -> Control:
        """Return the results of the unchanged copies: of all carriers and checks, unless some are named."""
        chosen = [one for one in KINDS[self.kind].carriers if carriers is None or one.name in set(carriers)]
        ids = [
            one.id
            for one in checks_for(self.kind)
            if one.level in ("core", self.level) and (only is None or one.id in only)
        ]
        pairs = [(carrier, id) for carrier in chosen for id in ids if id not in carrier.left_out]
        keys = {
            (carrier.name, id): _digest(self._kit.encode(), *self._sources(), self._label(carrier.name, id).encode())
            for carrier, id in pairs
        }
        kept = {pair: one for pair, key in keys.items() if (one := self._read(f"control-{key}")) is not None}
        missing = [(carrier, id) for carrier, id in pairs if (carrier.name, id) not in kept]
        for pair, one in self._control_of(missing).items():
            kept[pair] = one
            if one["outcome"] != "failed":
                self._write(f"control-{keys[pair]}", one)
        seconds: dict[str, dict[str, float]] = {carrier.name: {} for carrier in chosen}
        failed = []
        reached: dict[str, list[list[str]]] = {}
        for carrier, id in pairs:
            one = kept[carrier.name, id]
            if one["outcome"] == "failed":
                failed.append([carrier.name, id, one["reason"]])
            elif one["outcome"] == "passed":
                seconds[carrier.name][id] = one["seconds"]
                for statement in one["reached"]:
                    reached.setdefault(statement, []).append([carrier.name, id])
        return Control(seconds, reached, failed)

    def _control_of(self, pairs: Sequence[tuple[Carrier, str]]) -> dict[tuple[str, str], dict[str, Any]]:
        """Run these checks of these carriers on the unchanged copies."""
        if not pairs:
            return {}
        copies, statements = instrument(self.sources)
        work = self._new_folder()
        reach = ReachMap(work / "reach", len(pairs) + 1, len(statements))
        write_package(work, self.kind, copies)
        (work / PACKAGE / "_reach.py").write_text(reach.module, encoding="utf-8")
        plan = [
            (carrier, [(id, None, number) for number, (own, id) in enumerate(pairs, 1) if own == carrier])
            for carrier in KINDS[self.kind].carriers
            if any(own == carrier for own, _ in pairs)
        ]
        results, finished = self._run(work, plan, limit=900.0, all=True, reach=str(work / "reach"))
        assert finished, f"the checks of the unchanged copies took too long: {results[-1:]}"
        by_pair = {(one["carrier"], one["check"]): one for one in results}
        found = {}
        for number, (carrier, id) in enumerate(pairs, 1):
            one = by_pair.get((carrier.name, id)) or {**results[-1], "outcome": "failed"}  # its class doesn't load
            places = sorted(":".join(map(str, statements[index])) for index in reach.row(number))
            found[carrier.name, id] = {**one, "reached": places}
        shutil.rmtree(work, ignore_errors=True)
        return found

    # -- mutants ---------------------------------------------------------------------------------------------

    def run(
        self,
        mutants: Sequence[Mutant],
        control: Control,
        *,
        processes: int = 2,
        done: Callable[..., None] | None = None,
    ) -> dict[str, Verdict]:
        """Return the verdict of each mutant by its id; ``done`` is called with each mutant and its verdict."""
        verdicts: dict[str, Verdict] = {}

        def run_one(mutant: Mutant) -> None:
            verdict = self._verdict(mutant, control)
            with self._lock:
                verdicts[mutant.id] = verdict
                if done is not None:
                    done(mutant, verdict)

        with ThreadPoolExecutor(processes) as pool:
            for future in [pool.submit(run_one, one) for one in mutants]:
                future.result()
        return verdicts

    def checks_of(self, mutant: Mutant, control: Control) -> list[tuple[str, str]]:
        """Return the (carrier, check) that run the mutant's statement, the fastest first."""
        if mutant.statement is None:  # it runs when the module is imported
            pairs = [(carrier, id) for carrier, checks in control.seconds.items() for id in checks]
        else:
            line, column = mutant.statement
            pairs = [(carrier, id) for carrier, id in control.reached.get(f"{mutant.file}:{line}:{column}", ())]
        return sorted(pairs, key=lambda pair: control.seconds[pair[0]][pair[1]])

    def _verdict(self, mutant: Mutant, control: Control) -> Verdict:
        pairs = self.checks_of(mutant, control)
        if not pairs:
            return Verdict("survived")
        changed = {**self.sources, mutant.file: mutant.apply(self.sources[mutant.file])}
        key = f"mutant-{_digest(self._kit.encode(), self.kind.encode(), *self._sources(changed))}"
        kept = self._read(key) or {"made": {}, "killed": None}
        labels = {pair: self._label(*pair) for pair in pairs}
        if kept["killed"] is not None and kept["killed"]["label"] in labels.values():
            return Verdict(**kept["killed"]["verdict"], reached=len(pairs))
        left = [pair for pair in pairs if labels[pair] not in kept["made"]]
        killer = self._read(f"killer-{_digest(mutant.id.encode())}")
        if killer is not None and (pair := (killer["carrier"], killer["check"])) in left:
            left = [pair, *(one for one in left if one != pair)]
        verdict = self._try(mutant, changed, left, control) if left else Verdict("survived")
        if verdict.outcome == "killed":
            told = {name: value for name, value in asdict(verdict).items() if name not in ("reached", "skipped")}
            label = labels.get((verdict.carrier, verdict.check), "load")
            if label != "load":
                self._write(key, {**kept, "killed": {"label": label, "verdict": told}})
                self._write(
                    f"killer-{_digest(mutant.id.encode())}", {"carrier": verdict.carrier, "check": verdict.check}
                )
        elif verdict.outcome == "survived":
            made = {labels[pair]: f"{pair[0]}:{pair[1]}" in verdict.skipped for pair in left}
            kept["made"] |= made
            self._write(key, kept)
            skipped = tuple(f"{pair[0]}:{pair[1]}" for pair in pairs if kept["made"][labels[pair]])
            return replace(verdict, reached=len(pairs), skipped=skipped)
        return replace(verdict, reached=len(pairs))

    def _try(
        self, mutant: Mutant, changed: Mapping[str, str], pairs: Sequence[tuple[str, str]], control: Control
    ) -> Verdict:
        start = time.monotonic()
        work = self._new_folder()
        with _PARSING:
            write_package(work, self.kind, changed)
        by_name = {one.name: one for one in KINDS[self.kind].carriers}
        # one session per carrier: its processes are started once
        plan = [
            (by_name[name], [(id, max(10.0, 8 * control.seconds[name][id]), 0) for own, id in pairs if own == name])
            for name in dict.fromkeys(name for name, _ in pairs)
        ]
        limit = 90.0 + 5 * sum(control.seconds[name][id] for name, id in pairs)
        results, finished = self._run(work, plan, limit=limit)
        shutil.rmtree(work, ignore_errors=True)
        seconds = round(time.monotonic() - start, 1)
        failed = [one for one in results if one["outcome"] == "failed"]
        skipped = tuple(f"{one['carrier']}:{one['check']}" for one in results if one["outcome"] == "skipped")
        if failed:
            reason = failed[0]["reason"]
            return Verdict(
                "killed", failed[0]["carrier"], failed[0]["check"], "HANG" in reason, len(pairs), skipped, seconds,
                "\n".join(reason.splitlines()[:3] + reason.splitlines()[-2:]),
            )  # fmt: skip
        outcome = "survived" if finished else "timeout"
        last = results[-1]["check"] if results else ""
        return Verdict(outcome, "", "" if finished else last, False, len(pairs), skipped, seconds)

    # -- processes -------------------------------------------------------------------------------------------

    def _run(
        self,
        work: Path,
        plan: Sequence[tuple[Carrier, Sequence[tuple[str, float | None, int]]]],
        *,
        limit: float,
        all: bool = False,
        reach: str = "",
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the results in a fork, and whether it ended by itself before ``limit`` seconds had passed."""
        output, specification = work / "results", work / "specification"
        given = {
            "kind": self.kind, "output": str(output), "all": all, "reach": reach, "patience": PATIENCE,
            "carriers": [
                {
                    "name": carrier.name, "alias": carrier.alias or carrier.name, "target": target(carrier),
                    "defaults": dict(carrier.defaults), "options": dict(carrier.options), "checks": list(checks),
                }
                for carrier, checks in plan
            ],
        }  # fmt: skip
        specification.write_text(json.dumps(given), encoding="utf-8")
        tag = uuid.uuid4().hex
        environ = {**os.environ, TAG: tag, "OMP_NUM_THREADS": "1", "TMPDIR": str(work)}
        with open(work / "log", "wb") as log:
            pid = self._server.fork(
                [str(HERE / "run_checks.py"), str(specification)],
                environ,
                folder=str(work),
                descriptors={1: log.fileno(), 2: log.fileno()},
                new_session=True,
                path=[str(work), *(os.path.abspath(entry) for entry in sys.path if entry)],
                adopt=True,
                prelude=str(HERE / "prelude.py"),
            )
        assert pid is not None
        status = _wait(pid, limit)
        _kill_tagged(tag)
        lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
        results = [json.loads(line) for line in lines]
        if status and not any(one["outcome"] == "failed" for one in results):  # the mutant ended the process
            log_text = (work / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
            name = plan[0][0].name
            results.append({"carrier": name, "check": "load", "outcome": "failed", "reason": log_text, "seconds": 0.0})
        return results, status is not None

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    # -- cache -----------------------------------------------------------------------------------------------

    def _sources(self, sources: Mapping[str, str] | None = None) -> list[bytes]:
        """Return what of the files decides a result; where lines are matters for the unchanged ones alone."""
        if sources is None:
            return [f"{file}\n{text}".encode() for file, text in sorted(self.sources.items())]
        with _PARSING:
            return [f"{file}\n{_without_docstrings(text)}".encode() for file, text in sorted(sources.items())]

    def _label(self, carrier: str, id: str) -> str:
        """Return a text that changes with the carrier, the check, and the modules of checks that this one uses."""
        if id not in self._check_digests:
            module = CHECKS[id].function.__module__
            self._check_digests[id] = _digest(*(path.read_bytes() for path in _modules_of_checks(module)))
        made = next(one for one in KINDS[self.kind].carriers if one.name == carrier)
        return f"{carrier}:{id}:{_digest(repr(made).encode(), self._check_digests[id].encode())}"

    def _read(self, key: str) -> dict[str, Any] | None:
        if self._cache is None:
            return None
        try:
            found: dict[str, Any] = json.loads((self._cache / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def _write(self, key: str, value: Mapping[str, Any]) -> None:
        if self._cache is None:
            return
        self._cache.mkdir(exist_ok=True)
        temporary = self._cache / f"{key}.{uuid.uuid4().hex}"
        temporary.write_text(json.dumps(value), encoding="utf-8")
        os.replace(temporary, self._cache / f"{key}.json")


def _modules_of_checks(module: str) -> list[Path]:
    """Return the files of this module of checks and of those that it imports."""
    folder = Path(torchhal_conformance.__file__).parent / "checks"
    found: set[Path] = set()
    unread = [folder / f"{module.rpartition('.')[2]}.py"]
    while unread:
        if (path := unread.pop()) in found:
            continue
        found.add(path)
        with _PARSING:
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchhal_conformance.checks"):
                names = [(node.module or "").rpartition(".")[2], *(one.name for one in node.names)]
                unread += [other for name in names if (other := folder / f"{name}.py").exists()]
    return sorted(found)


def _without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _digest(*parts: bytes) -> str:
    made = hashlib.sha256()
    for one in parts:
        made.update(len(one).to_bytes(8, "little") + one)
    return made.hexdigest()[:32]


def _wait(pid: int, limit: float) -> int | None:
    """Return the exit status of the process, or None if it had to be killed after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _kill_tagged(tag: str) -> None:
    """Kill what a run has left behind; its ranks end by themselves a second after it."""
    needle = f"{TAG}={tag}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass
