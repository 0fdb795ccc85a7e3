"""Checkpoints of the engine: exact resume, other numbers of ranks, other stages and strategies, one portable file."""

import os
import pickle
import shutil
import subprocess
import sys

import engine_training as training
import pytest
import torch

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cli import main
from torchhal.errors import CheckpointError
from torchhal_deepspeed.checkpoint import PLAIN, DeepSpeedCheckpointIO

pytestmark = pytest.mark.timeout(300)

STAGES = {"deepspeed_stage_1": "Net", "deepspeed_stage_2_offload": "Momentum", "deepspeed_stage_3": "Net"}


@pytest.fixture(scope="module")
def written(world2, tmp_path_factory):
    """``written(alias, io, model)``: the checkpoint in the midst of a run of two ranks, and the run's results."""
    runs = {}

    def write(alias, io=None, model="Net"):
        if (alias, io, model) not in runs:
            folder = str(tmp_path_factory.mktemp(alias))
            results = world2.run(training.write, alias, 2, folder, io, model, timeout=200)
            runs[alias, io, model] = os.path.join(folder, "epoch=0-step=4.ckpt"), results
        return runs[alias, io, model]

    return write


def assert_same(results, undisturbed, exact=True):
    compare = torch.equal if exact else (lambda a, b: torch.allclose(a, b, rtol=2e-5, atol=2e-6))
    for name, value in undisturbed[0]["state"].items():
        if exact or "running" not in name:
            assert compare(results[0]["state"][name], value), name
    for index, entry in undisturbed[0]["optimizer"]["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert compare(results[0]["optimizer"]["state"][index][key], value), (index, key)
    assert results[0]["step"] == undisturbed[0]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("io", [None, "torch", "dcp"])
@pytest.mark.parametrize("alias", STAGES)
def test_resume_is_exact(world2, written, alias, io):
    path, undisturbed = written(alias, io, STAGES[alias])
    results = world2.run(training.resume, alias, 2, path, io, STAGES[alias], timeout=200)
    assert_same(results, undisturbed)
    assert results[0]["losses"] == undisturbed[0]["losses"][4:]
    assert results[0]["rates"] == undisturbed[0]["rates"][4:]


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["deepspeed_stage_1", "deepspeed_stage_3"])
def test_any_strategy_goes_on(world2, world3, written, writer):
    """The same global batches on another number of ranks, at another stage, under ddp and on one device."""
    path, undisturbed = written(writer, None, "Layered")
    for alias, world in (("deepspeed_stage_2", world3), ("deepspeed_stage_3", world3), ("ddp", world2)):
        results = world.run(training.resume, alias, world.size, path, "deepspeed", "Layered", timeout=200)
        assert_same(results, undisturbed, exact=alias == "ddp")
    assert_same([training.resume("single_device", 1, path, "deepspeed", "Layered")], undisturbed, exact=False)


@pytest.mark.slow
def test_a_checkpoint_of_ddp_goes_on_under_deepspeed(world2, written):
    path, undisturbed = written("ddp")
    for alias in ("deepspeed_stage_1", "deepspeed_stage_3", {"stage": 0}):
        assert_same(world2.run(training.resume, alias, 2, path, "torch", timeout=200), undisturbed)


@pytest.mark.slow
def test_mixed_precision_and_the_engines_scheduler_resume_exactly(world2, tmp_path):
    for strategy, model, precision in ((training.BF16, "Net", "bf16-mixed"), (training.OWN, "EnginesOwn", "32-true")):
        folder = str(tmp_path / model)
        undisturbed = world2.run(training.write_in, strategy, folder, model, precision, timeout=200)
        path = os.path.join(folder, "epoch=0-step=4.ckpt")
        results = world2.run(training.resume_in, strategy, path, model, precision, timeout=200)
        assert_same(results, undisturbed)
        assert results[0]["rates"] == undisturbed[0]["rates"][4:]


def test_a_checkpoint_in_the_midst_of_an_accumulation_says_what_it_lacks(world2, tmp_path):
    path = str(tmp_path / "midst.ckpt")
    whole = world2.run(training.midst, "deepspeed_stage_2", None, path, timeout=200)
    assert [len(said) for _, said in whole] == [1, 0]
    assert "in the midst of an accumulation" in whole[0][1][0]
    again = world2.run(training.midst, "deepspeed_stage_2", path, None, timeout=200)
    assert again[0][0]["step"] == whole[0][0]["step"] == 3
    assert again[0][0]["losses"][:2] == whole[0][0]["losses"][6:8]  # the next step had fewer gradients


def test_a_run_that_is_over_can_be_saved_and_continued(world2, written, tmp_path):
    _, undisturbed = written("deepspeed_stage_3")
    for stage in (1, 3):
        path = str(tmp_path / f"{stage}.ckpt")
        assert world2.run(training.save_after, {"stage": stage}, path, timeout=200) == [None, None]
        assert_same(world2.run(training.resume, {"stage": stage}, 2, path, timeout=200), undisturbed)
    late = world2.run(training.save_after, {"stage": 3}, str(tmp_path / "late.ckpt"), "Late", timeout=200)
    assert all("save while it runs" in said for said in late)


@pytest.mark.parametrize("writer", ["deepspeed_stage_1", "deepspeed_stage_3"])
def test_consolidated_it_is_one_file_for_every_strategy(world2, written, tmp_path, capsys, writer):
    path, undisturbed = written(writer, None, "Layered")
    target = str(tmp_path / "portable.ckpt")
    assert main(["checkpoint", "consolidate", path, target]) == 0
    assert_same(world2.run(training.resume, "ddp", 2, target, None, "Layered", timeout=200), undisturbed)
    assert_same([training.resume("single_device", 1, target, None, "Layered")], undisturbed, exact=False)
    loaded = TorchCheckpointIO().load_checkpoint(target)
    weights = loaded["state_dict"]
    assert list(weights) == list(training.Layered().state_dict())
    assert weights["layers.0.weight"].data_ptr() == weights["layers.1.weight"].data_ptr()  # tied
    assert main(["checkpoint", "inspect", path]) == 0
    assert "checkpoint_io  deepspeed" in capsys.readouterr().out


def test_deepspeeds_own_tools_take_the_folder(written, tmp_path):
    """zero_to_fp32 and ds_to_universal: what was trained here goes on in any program with DeepSpeed."""
    path, _ = written("deepspeed_stage_3")
    universal = tmp_path / "universal" / "engine"
    script = (
        "import argparse, sys, torch\n"
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as weights\n"
        "from deepspeed.checkpoint.ds_to_universal import main\n"
        "torch.save(dict(weights(sys.argv[1])), sys.argv[3])\n"
        "main(argparse.Namespace(input_folder=sys.argv[1] + '/engine', output_folder=sys.argv[2], strict=True,\n"
        "    num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, inject_missing_state=True))\n"
    )
    weights = tmp_path / "weights.pt"
    command = [sys.executable, "-c", script, path, str(universal), str(weights)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    ours = DeepSpeedCheckpointIO().load_checkpoint(path)
    for name, value in torch.load(weights).items():
        assert torch.equal(value, ours["state_dict"][name]), name
    momentum = torch.load(universal / "zero" / "scale" / "exp_avg.pt", weights_only=False)
    momentum = momentum["param"] if isinstance(momentum, dict) else momentum
    state = ours["optimizer_states"][0]["state"]
    assert any(torch.equal(momentum.flatten(), entry["exp_avg"]) for entry in state.values() if "exp_avg" in entry)


@pytest.mark.parametrize("alias", ["deepspeed_stage_1", "deepspeed_stage_3"])
def test_damage_is_refused(written, tmp_path, alias):
    path = tmp_path / "copy.ckpt"
    shutil.copytree(written(alias)[0], path)
    files = [path / PLAIN, *(path / "engine").iterdir()]
    assert len(files) > 3
    io = DeepSpeedCheckpointIO()
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
        with pytest.raises(CheckpointError, match=r"checksum|damaged"):
            io.load_checkpoint(path)
        file.unlink()
        with pytest.raises((CheckpointError, FileNotFoundError), match=r"missing|no checkpoint"):
            io.load_checkpoint(path)
        file.write_bytes(whole)
    io.load_checkpoint(path)


def test_nothing_hostile_is_executed(written, tmp_path):
    path = tmp_path / "copy.ckpt"
    shutil.copytree(written("deepspeed_stage_3")[0], path)

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    from torchhal_deepspeed._partitioned_tensors import Files, StoredPart, checksum

    file = next((path / "engine").iterdir())
    torch.save({"x": Hostile()}, file, pickle_module=pickle)
    files = Files(path, {f"engine/{file.name}": checksum(file)})
    with pytest.raises(CheckpointError, match="can't be read"):
        files.flat(StoredPart(f"engine/{file.name}", ("x",), 0, 1, 0))
    assert not (tmp_path / "executed").exists()


def test_what_does_not_fit_is_named(world2, written):
    path, _ = written("deepspeed_stage_3")
    shapes = "'norm.running_mean' has the shape (16,) in the checkpoint and (15,) here"  # parameters are divided
    for model, words in (("Odd", shapes), ("More", "lacks 'more.weight'")):
        outcomes = world2.outcomes(training.resume, "deepspeed_stage_3", 2, path, None, model, timeout=200)
        assert {outcome.error for outcome in outcomes} == {"CheckpointMismatchError"}
        assert words in outcomes[0].message and path in outcomes[0].message


def test_a_full_disk_is_an_error_on_every_rank_and_costs_no_checkpoint(world2, tmp_path):
    for stage in (1, 3):
        outcomes = world2.run(training.full_disk, stage, str(tmp_path / str(stage)), timeout=200)
        for error, kept, beside in outcomes:
            assert "CheckpointError" in error and "rank 1" in error
            assert kept == 1 and beside == ["c.ckpt"]


def test_plain_dicts_are_kept_too(tmp_path):
    io, path = DeepSpeedCheckpointIO(), tmp_path / "new" / "c.ckpt"
    for value in (1.0, 2.0):
        io.save_checkpoint({"a": torch.full((3,), value), "n": [1, {"b": "x"}], 3: torch.ones(())}, path)
        loaded = io.load_checkpoint(path)
        assert (loaded["n"], loaded["a"].tolist(), loaded[3].item()) == ([1, {"b": "x"}], [value] * 3, 1)
    assert io.list_checkpoints(path.parent) == [str(path)]
    io.remove_checkpoint(path)
    assert os.listdir(path.parent) == []
    with pytest.raises(FileNotFoundError, match=r"c\.ckpt"):
        io.load_checkpoint(path)
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, path, storage_options={"key": 1})
