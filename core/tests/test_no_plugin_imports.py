"""Test in fresh processes that a Trainer of built-in components imports no plugin, however many are installed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COUNT = 500
MANIFEST = """\
from torchhal.plugin import Component, hookimpl

@hookimpl
def torchhal_cluster_environments():
    return [Component("cluster_{n}", "many_{n}.environment:Env")]

@hookimpl
def torchhal_strategies():
    return [Component("strategy_{n}", "many_{n}.strategy:Strategy")]

@hookimpl
def torchhal_{accelerator}():
    return [Component("board_{n}", "many_{n}.accelerator:Board", requires=("no_such_vendor",))]
"""


def install(folder: Path, count: int, *, accelerators: str = "") -> None:
    """Install ``count`` plugins and one that ends the process; ``accelerators``: as in their torchhal.auto."""
    for n in range(count):
        package, info = folder / f"many_{n}", folder / f"many_{n}-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        hook = "accelerators" if accelerators else "precisions"
        (package / "__init__.py").touch()
        (package / "_plugin.py").write_text(MANIFEST.format(n=n, accelerator=hook))
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: many-{n}\nVersion: 1.0\nRequires-Dist: torchhal\n"
        )
        declared = f"[torchhal.detect]\nMANY_RANK_{n} = cluster_{n}\n"
        declared += f"[torchhal.auto]\nboard_{n} = {accelerators}\n" if accelerators else ""
        (info / "entry_points.txt").write_text(f"[torchhal]\nmany_{n} = many_{n}._plugin\n{declared}")
    (folder / "exits_manifest.py").write_text("import os\nos._exit(3)\n")
    info = folder / "exits-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: exits\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchhal]\nexits = exits_manifest\n[torchhal.detect]\nEXITS = exits\n")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    install(folder, COUNT)
    return folder


HEAD = """
import sys, time, warnings
warnings.simplefilter("ignore")
from torchhal import Trainer

def touched():
    return [name for name in sys.modules if name.startswith(("many_", "exits")) or name == "importlib_metadata"]

def quiet(**arguments):
    return Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, **arguments)
"""


def python(program: str, path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHHAL_")}
    folders = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program)],
        env={**clean, "PYTHONPATH": folders, **environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.cold_start
@pytest.mark.parametrize(
    "arguments",
    [
        "accelerator='cpu'",
        "accelerator='cpu', strategy='ddp', devices=2, precision='bf16-mixed'",
        "accelerator='cpu', plugins='local'",
        "accelerator='cpu', strategy='ddp', plugins=['torch', 'torchhal/local']",
    ],
)
def test_named_built_in_components(many: Path, arguments: str) -> None:
    """Nothing of a plugin, nor what reads metadata in full, is imported."""
    done = python(f"quiet({arguments}); print(touched())", many)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.cold_start
def test_auto_and_cluster_variable(many: Path) -> None:
    """ "auto" imports no manifest that brings no accelerator; TORCHHAL_CLUSTER names a built-in environment."""
    program = "quiet(); print([name for name in touched() if name != 'importlib_metadata'])"
    for environ in ({}, {"TORCHHAL_CLUSTER": "local"}):
        done = python(program, many, **environ)
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.cold_start
def test_declared_variable_reaches_its_plugin_alone(many: Path) -> None:
    program = "quiet(accelerator='cpu'); print(sorted(name for name in touched() if 'many' in name or 'exits' in name))"
    done = python(program, many, MANY_RANK_7="0")
    assert (done.returncode, done.stdout) == (0, "['many_7', 'many_7._plugin']\n"), done.stderr
    assert python(program, many, EXITS="1").returncode == 3  # it is this plugin that would have ended the others


@pytest.mark.slow
def test_ranks_that_torchhal_starts(many: Path, tmp_path: Path) -> None:
    """A fit in spawned processes, and in those of a script that is run again, imports no plugin in any of them."""
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + textwrap.dedent("""
        import torch
        from torchhal import Module

        class Net(Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def training_step(self, batch, index):
                return self.layer(batch).sum()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)
            def on_train_end(self):
                sys.stdout.write(f"touched {touched()}\\n")

        if __name__ == "__main__":
            trainer = quiet(accelerator="cpu", strategy=sys.argv[1], devices=2, max_steps=1, enable_model_summary=False)
            trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
    """)
    )
    for strategy in ("ddp_spawn", "ddp"):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHHAL_")}
        done = subprocess.run(
            [sys.executable, str(script), strategy],
            env={**clean, "PYTHONPATH": os.pathsep.join([str(many), os.environ.get("PYTHONPATH", "")])},
            capture_output=True, text=True, timeout=170, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("touched []") == 2, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["accelerator='cpu'", ""])
def test_cost_of_500_plugins(many: Path, tmp_path: Path, arguments: str) -> None:
    """The processor time of a first Trainer is at most twice that without them, the smallest of five each."""
    alone = tmp_path / "alone"
    alone.mkdir()
    declared = tmp_path / "declared"
    declared.mkdir()
    install(declared, COUNT, accelerators="no_such_vendor")
    program = f"""
    before = time.process_time()
    quiet({arguments})
    print(time.process_time() - before)
    """
    costs = {path: min(float(python(program, path).stdout) for _ in range(5)) for path in (alone, many, declared)}
    base = costs.pop(alone)
    assert all(cost <= 2 * base for cost in costs.values()), (base, costs)
