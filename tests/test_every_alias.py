"""Train once with every alias of every strategy, precision and checkpoint IO, as a user's script would.

What can't be used on this machine says so, with what is missing. This is the broad look of the fast tier; each part's
own tests say whether it is right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from lighthouses import lighthouse

from torchhal import registry

SCRIPT = Path(__file__).parent / "scripts" / "train_alias.py"
ALONE = {"single_device", "none", "hpu_single"}
ALONE_BY_PLUGIN = {"deepspeed", "hivemind", "ipu", "torchft"}
"""Strategies that have one process here: they know no other number, or importing the engine takes long."""

ONE_OF_BOTH = {"dp", "ddp2"}
"""Strategies of one process with two devices."""

ENVIRONMENT = {
    "bagua": {"BAGUA_STUB": "1"},
    "hivemind": {"TORCHHAL_HIVEMIND_TARGET_BATCH_SIZE": "4"},
    "hpu": {"HABANA_FRAMEWORKS_STUB": "1"},
    "ipu": {"POPTORCH_STUB": "1"},
}
"""By plugin: what stands for its hardware here, or what it can't do without."""

FAIRSCALE = "needs the package fairscale, which is not installed"
XLA = "'torch_xla' is not installed"
REFUSED = {
    ("strategy", "deepspeed_stage_3_offload_nvme"): "needs a folder on the NVMe drive",
    ("strategy", "single_xla"): XLA,
    ("strategy", "single_tpu"): XLA,
    ("strategy", "xla"): XLA,
    ("strategy", "tpu_spawn"): XLA,
    ("strategy", "xla_spmd"): XLA,
    ("strategy", "xla_fsdp"): XLA,
    ("checkpoint_io", "xla"): XLA,
    **{
        ("strategy", f"colossalai{stage}"): "needs the package colossalai, which is not installed"
        for stage in ("", "_zero1", "_zero2", "_gemini")
    },
    ("strategy", "fairscale_oss"): FAIRSCALE,
    ("strategy", "fairscale_sdp"): FAIRSCALE,
    ("strategy", "fairscale_pipe"): FAIRSCALE,
    ("strategy", "horovod"): "needs the package horovod, which is not installed",
    ("precision", "tf32"): "needs matmul:tf32, which accelerator 'cpu' doesn't have",
    ("precision", "hpu-fp8"): "needs Intel's transformer engine",
}
"""What this machine, or an alias without options, can't train with, and why."""


def aliases(kind):
    return [
        pytest.param(alias, entry.plugin, id=alias)
        for entry in registry.entries(kind)
        for alias in (entry.component.alias, *entry.component.aliases)
    ]


def accelerator_of(plugin):
    return plugin if plugin in ("hpu", "ipu") else "cpu"


def train(folder, plugin, devices, **arguments):
    environ = {**os.environ, **ENVIRONMENT.get(plugin, {}), "OMP_NUM_THREADS": "1"}
    with lighthouse() if plugin == "torchft" else nullcontext() as address:
        if address:
            environ["TORCHFT_LIGHTHOUSE"] = address
        command = [sys.executable, str(SCRIPT), str(devices), str(folder), json.dumps(arguments)]
        return subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )


def check(done, kind, alias, processes, folder):
    if (reason := REFUSED.get((kind, alias))) is not None:
        assert done.returncode == 1
        assert "torchhal.errors." in done.stderr and reason in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "trained " in done.stdout
    assert len(list((folder / "processes").iterdir())) == processes
    assert list(folder.rglob("*.ckpt")), "nothing was saved"


@pytest.mark.parametrize(("alias", "plugin"), aliases("strategy"))
def test_every_strategy_trains(alias, plugin, tmp_path):
    devices = 1 if alias in ALONE or plugin in ALONE_BY_PLUGIN else 2
    done = train(tmp_path, plugin, devices, strategy=alias, accelerator=accelerator_of(plugin))
    check(done, "strategy", alias, 1 if alias in ONE_OF_BOTH else devices, tmp_path)


@pytest.mark.parametrize(("alias", "plugin"), aliases("precision"))
def test_every_precision_trains(alias, plugin, tmp_path):
    done = train(tmp_path, plugin, 1, precision=alias, accelerator=accelerator_of(plugin))
    check(done, "precision", alias, 1, tmp_path)


@pytest.mark.parametrize(("alias", "plugin"), aliases("checkpoint_io"))
def test_every_checkpoint_io_saves(alias, plugin, tmp_path):
    strategy = "deepspeed_stage_2" if plugin == "deepspeed" else "auto"
    accelerator = accelerator_of(plugin)
    done = train(tmp_path, plugin, 1, plugins=[alias], strategy=strategy, accelerator=accelerator)
    check(done, "checkpoint_io", alias, 1, tmp_path)


@pytest.mark.parametrize(("alias", "plugin"), aliases("accelerator"))
def test_every_accelerator_is_there_or_says_why_not(alias, plugin):
    entry = registry.find("accelerator", alias)
    availability = entry.load().availability()
    assert availability.ok or availability.reason


@pytest.mark.parametrize(("alias", "plugin"), aliases("cluster_environment"))
def test_every_environment_can_be_made(alias, plugin):
    assert registry.find("cluster_environment", alias).load().detect() in (True, False)
