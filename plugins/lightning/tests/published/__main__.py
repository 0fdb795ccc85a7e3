"""Trains models of published libraries by Lightning's Trainer and by torchhal's, and compares the two step by step.

    python plugins/lightning/tests/published [NAME ...]

Each file in ``cases`` is a script that trains a library's model on data that it makes, and names the packages that it
wants. Each gets an environment of its own, ``.venv-published/NAME``: what the library asks for beside the torch of
``constraints.txt``, which all share (``.venv-published/torch``), and this checkout's core and plugin. There it runs by

- lightning: Lightning's own Trainer,
- facade: ``python -m torchhal_lightning``, for which the case is not changed,
- bridge: ``torchhal.Trainer``, where the case makes the Trainer itself and the library doesn't.

Losses of the steps are to be the same bits. Metrics at each epoch's end, which are sums in another precision, and the
weights after the training may differ by a millionth. One line says for each library how many steps were compared, and
whether they are equal. The exit status is 1 if any differs or fails. What the commands print is in
``.venv-published/NAME.log``.

Without a case, as they don't install beside the torch and Lightning of now: careamics (pip looks for a set of versions
for more than half an hour), eugene-tools (wants scikit-learn 1.2.0), lightning-flash and quaterion (Lightning 1.9),
torch-spatiotemporal (imports torch_sparse, which has no wheel for them). finetuning-scheduler reads Lightning's private
parts. rectools differs: it draws its weights in on_train_start, which here comes before the loader has drawn its seed.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
CASES = HERE / "cases"
ENVIRONMENTS = ROOT / ".venv-published"
STAND_INS = ENVIRONMENTS / "torch" / "stand-ins"
WAYS = ("lightning", "facade", "bridge")
PREFIX = "NOTED "  # of the line that noted.py prints
OWN = ("core", "plugins/lightning")
WANTED = ("pluggy", "importlib-metadata", "tqdm", "packaging", "fsspec", "numpy", "editables", "hatchling")


class Failed(Exception):
    """A step ended with an error; the message is what it printed last."""


class NotInstalled(Failed):
    """pip did not get or build a package."""


def call(command: list[str], log: Path, limit: float, **options: Any) -> str:
    """Run ``command``, append what it prints to ``log``, and return that.

    Raises:
        Failed: it ended with an error, or took longer than ``limit`` seconds.
    """
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit, **options
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not done after {limit:.0f} s") from error
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith(PREFIX)]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|ERROR)\b", line)]
        raise Failed((errors or lines or [f"exit status {done.returncode}"])[-1].strip())
    return done.stdout


def pip(python: Path, log: Path, *arguments: str, limit: float = 1800) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        call([*command, "--constraint", "constraints.txt", *arguments], log, limit, cwd=ROOT)
    except Failed as error:
        raise NotInstalled(str(error)) from error


def index_of_torch() -> list[str]:
    """Return the options by which the Makefile gets the torch for the CPU."""
    if not sys.platform.startswith("linux") or any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd")):
        return []
    found = re.search(r"^TORCH_INDEX := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].split() if found else []


def shared_torch() -> Path:
    """Make the environment of torch, which those of the libraries are laid upon, and return its packages' folder."""
    folder = ENVIRONMENTS / "torch"
    stamp, python, log = folder / "made", folder / "bin" / "python", ENVIRONMENTS / "torch.log"
    with (ENVIRONMENTS / "torch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may come at once
        if not stamp.exists():
            call([sys.executable, "-m", "venv", "--clear", str(folder)], log, 300)
            pip(python, log, "--no-deps", "--retries", "1", *index_of_torch(), "torch", "torchvision")
            pip(python, log, "torch", "torchvision", *WANTED)
            editable = [part for own in OWN for part in ("--editable", f"./{own}")]
            pip(python, log, "--no-deps", "--no-build-isolation", *editable)
            stand_in_for_cuda(packages_of(folder), log)
            stamp.touch()
    return packages_of(folder)


def stand_in_for_cuda(packages: Path, log: Path) -> None:
    """Compile what a torchvision that was built for CUDA asks of a torch without it, where those two came together.

    Nothing here calls any of it, but without it torchvision has none of its operators, and isn't imported.
    """
    compiled = packages / "torchvision" / "_C.so"
    needed = call(["objdump", "-p", str(compiled)], log, 60) if compiled.exists() else ""
    if "libc10_cuda.so" not in needed or (packages / "torch" / "lib" / "libc10_cuda.so").exists():
        return
    STAND_INS.mkdir(exist_ok=True)
    for name in ("libcudart", "libnvjpeg"):
        for real in packages.glob(f"torchvision.libs/{name}.*.so.*"):
            (STAND_INS / re.sub(r"\.\w+\.so", ".so", real.name, count=1)).symlink_to(real)
    symbols = call(["nm", "-D", "--undefined-only", str(compiled)], log, 60).split()
    functions = [f"int {symbol}(void) {{ return 0; }}\n" for symbol in symbols if "4cuda" in symbol]
    for name, text in (("libc10_cuda.so", "".join(functions)), ("libtorch_cuda.so", "")):
        source = STAND_INS / f"{name}.c"
        source.write_text(text, encoding="utf-8")
        call(["gcc", "-shared", "-fPIC", "-o", str(STAND_INS / name), str(source)], log, 60)


def packages_of(environment: Path) -> Path:
    return next(environment.glob("lib/python3*/site-packages"))


def environment(name: str, packages: list[str], log: Path) -> Path:
    """Make the environment of a library, and return its interpreter."""
    base = shared_torch()
    folder = ENVIRONMENTS / name
    stamp, python = folder / "made", folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != str(packages):
        call([sys.executable, "-m", "venv", "--clear", str(folder)], log, 300)
        below = packages_of(folder) / "torch_of_all.pth"  # searched after the library's own packages
        below.write_text(f"import site; site.addsitedir({str(base)!r})\n", encoding="utf-8")
        pip(python, log, *packages)
        stamp.write_text(str(packages), encoding="utf-8")
    return python


def run(way: str, python: Path, case: Path, log: Path) -> dict[str, Any]:
    """Train ``case`` by the Trainer of ``way``, and return what it noted."""
    folders = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"PYTHONPATH": folders, "PUBLISHED_TRAINER": way, "OMP_NUM_THREADS": "1"}
    # no accelerator, no downloads, and no reports of use to anybody
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "MPLBACKEND": "agg"}
    variables |= {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(STAND_INS), os.environ.get("LD_LIBRARY_PATH")]))}
    through = ["-m", "torchhal_lightning"] if way == "facade" else []
    with tempfile.TemporaryDirectory() as folder:
        script = shutil.copy(case, Path(folder, "case.py"))  # beside the cases, this one's name would be the library's
        said = call([str(python), *through, str(script)], log, 600, cwd=folder, env=variables)
    if PREFIX not in said:
        raise Failed("it didn't come to its end")
    noted: dict[str, Any] = json.loads(said[said.rindex(PREFIX) + len(PREFIX) :].splitlines()[0])
    if not noted["losses"]:
        raise Failed("no step was noted")
    if (way != "lightning") != any(each.startswith("torchhal") for each in noted["trainer"]):
        raise Failed(f"the Trainer was of {noted['trainer'][0]}")
    return noted


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return where two trainings differ first, or None."""
    for number, (one, other) in enumerate(zip(mine["losses"], theirs["losses"], strict=False)):
        if not (one == other or (math.isnan(one) and math.isnan(other))):
            return f"step {number}: {one!r} != {other!r}"
    lengths = len(mine["losses"]), len(theirs["losses"])
    if lengths[0] != lengths[1]:
        return f"step {min(lengths)}: {lengths[0]} steps, not {lengths[1]}"
    for number, (ours, expected) in enumerate(zip(mine["epochs"], theirs["epochs"], strict=False)):
        if ours.keys() != expected.keys():
            return f"epoch {number}: metrics {sorted(ours.keys() ^ expected.keys())} are in one only"
        for name, value in ours.items():
            if not close(value, expected[name]):
                return f"epoch {number}: {name} {value!r} != {expected[name]!r}"
    lengths = len(mine["epochs"]), len(theirs["epochs"])
    if lengths[0] != lengths[1]:
        return f"epoch {min(lengths)}: {lengths[0]} epochs, not {lengths[1]}"
    for one, other in zip(mine["weights"], theirs["weights"], strict=True):
        if not close(one, other):
            return f"the weights at the end: {one!r} != {other!r}"
    return None


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))


def compare(case: Path, environments: Path | None) -> bool:
    """Run a case by each Trainer, print its line, and return whether all are equal."""
    text = case.read_text(encoding="utf-8")
    packages = ast.literal_eval(re.search(r"^PACKAGES = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)[1])
    ways = [way for way in WAYS if way != "bridge" or "noted.trainer(" in text]
    ENVIRONMENTS.mkdir(exist_ok=True)
    log = ENVIRONMENTS / f"{case.stem}.log"
    log.unlink(missing_ok=True)
    results, equal, theirs, release, began = [], True, None, "", time.monotonic()
    try:
        python = environments.absolute() / "bin" / "python" if environments else environment(case.stem, packages, log)
        project = re.split(r"[\[<>=!~ ]", packages[0])[0]
        says = f"from importlib.metadata import version; print(version({project!r}))"
        release = call([str(python), "-c", says], log, 60).split()[-1]
        theirs = run("lightning", python, case, log)
    except Failed as failure:
        who = "pip" if isinstance(failure, NotInstalled) else "lightning"
        results, equal = [f"{who} fails: {failure}"], False
    for way in ways[1:] if theirs else ():
        try:
            differs = difference(run(way, python, case, log), theirs)
        except Failed as failure:
            results.append(f"{way} fails: {failure}")
            equal = False
        else:
            results.append(f"{way} differs at {differs}" if differs else f"{way} equal")
            equal = equal and not differs
    steps = len(theirs["losses"]) if theirs else 0
    took = time.monotonic() - began
    print(f"{case.stem:28} {release:12} {steps:4} steps  {'; '.join(results)}  ({took:.0f} s)", flush=True)
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in CASES.glob("*.py"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all without: {' '.join(names)}")
    parser.add_argument("--keep", action="store_true", help="keep each library's environment, for the next run")
    parser.add_argument("--environment", type=Path, help="run all in this one, which has the packages, and make none")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(names)):
        parser.error(f"no such case: {' '.join(unknown)}")
    equal = True
    for name in chosen.names or names:
        equal = compare(CASES / f"{name}.py", chosen.environment) and equal
        if not chosen.keep and not chosen.environment:
            shutil.rmtree(ENVIRONMENTS / name, ignore_errors=True)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
