"""torchhal checkpoint on what dcp writes: any strategy goes on from the file that is made of the folder."""

import json
import os

import pytest
import torch
import training
from parity import TRANSFORMER

from torchhal import cli
from torchhal.checkpoint import TorchCheckpointIO
from torchhal_parallel.checkpoint.dcp import DCPCheckpointIO

pytestmark = pytest.mark.timeout(170)


@pytest.fixture(scope="module")
def folder(world2, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("zero3"))
    world2.run(training.write, "zero3", 2, TRANSFORMER, path, "dcp", timeout=100)
    return os.path.join(path, "epoch=0-step=5.ckpt")


def test_inspect(folder, capfd):
    assert cli.main(["checkpoint", "inspect", folder, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    facts = [found[name] for name in ("checkpoint_io", "world_size", "optimizers", "global_step")]
    assert facts == ["dcp", 2, 1, 5]
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert tensors["state_dict/embed.weight"]["shape"] == [20, 32]
    assert tensors["optimizer_states/0/state/0/exp_avg"]["bytes"] == 8 * 32 * 4


@pytest.mark.slow
def test_any_strategy_goes_on_from_the_file(world2, folder, tmp_path):
    target = str(tmp_path / "one.ckpt")
    assert cli.main(["checkpoint", "consolidate", folder, target]) == 0
    before = world2.run(training.resume, "zero3", 2, TRANSFORMER, folder, "dcp", timeout=100)
    after = world2.run(training.resume, "zero3", 2, TRANSFORMER, target, "torch", timeout=100)
    alone = training.resume("single_device", 1, TRANSFORMER, target, "torch")
    for name, value in before[0]["state"].items():
        assert torch.equal(after[0]["state"][name], value), name
        torch.testing.assert_close(alone["state"][name], value, rtol=3e-4, atol=3e-4)


def test_weights_alone(folder, tmp_path):
    from safetensors.torch import load_file

    weights = DCPCheckpointIO().load_checkpoint(folder)["state_dict"]
    for ending in ("ckpt", "safetensors"):
        target = tmp_path / f"x.{ending}"
        assert cli.main(["checkpoint", "consolidate", folder, str(target), "--weights-only"]) == 0
        if ending == "ckpt":
            loaded = TorchCheckpointIO().load_checkpoint(target)["state_dict"]
        else:
            loaded = load_file(target)
        assert sorted(loaded) == sorted(weights) and all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_export_of_a_sharded_checkpoint(folder, tmp_path):
    from safetensors.torch import load_file

    from torchhal.export import export

    weights = DCPCheckpointIO().load_checkpoint(folder)["state_dict"]
    export(folder, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert sorted(loaded) == sorted(weights) and all(torch.equal(loaded[name], weights[name]) for name in weights)
    card = (tmp_path / "README.md").read_text()
    assert "| strategy | zero3 |" in card and "| processes | 2 |" in card and "| steps | 5 |" in card


def test_damage_is_said(folder, tmp_path, capfd):
    import shutil

    copy = tmp_path / "copy.ckpt"
    shutil.copytree(folder, copy)
    shard = copy / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-4000])
    assert cli.main(["checkpoint", "consolidate", str(copy), str(tmp_path / "x.ckpt")]) == 2
    assert "damaged" in capfd.readouterr().err and not (tmp_path / "x.ckpt").exists()
    (copy / ".metadata").unlink()
    assert cli.main(["checkpoint", "inspect", str(copy)]) == 2
    assert ".metadata' is missing: copy the whole folder again" in capfd.readouterr().err
    (copy / "plain.ckpt").unlink()
    assert cli.main(["checkpoint", "inspect", str(copy)]) == 2
    assert "it is incomplete" in capfd.readouterr().err
