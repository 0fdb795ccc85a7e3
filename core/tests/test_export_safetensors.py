"""torchhal.export to safetensors, which weights it takes, and the model card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import Images, Other, Tied, trained

import torchhal
from torchhal import cli
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointError, CheckpointMismatchError, ConfigurationError
from torchhal.export import export

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, load_model


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(Images(3), tmp_path_factory.mktemp("images") / "x.ckpt", epochs=2)


def state_of(path: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = TorchCheckpointIO().load_checkpoint(path)["state_dict"]
    return state


def test_weights_are_those_of_the_checkpoint(images: str, tmp_path: Path) -> None:
    done = export(images, tmp_path / "new" / "x.safetensors")
    loaded, state = load_file(done.path), state_of(images)
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    with safe_open(done.path, "pt") as file:
        assert file.metadata() == {
            "format": "pt", "epoch": "2", "global_step": "4", "torchhal_version": torchhal.__version__,
        }  # fmt: skip
    assert sorted(os.listdir(tmp_path / "new")) == ["README.md", "x.safetensors"]
    model = Images(3)
    load_model(model, done.path)
    reference = Images.load_from_checkpoint(images)
    batch = torch.randn(5, 3, 6, 6)
    assert torch.equal(model.eval()(batch), reference.eval()(batch))


def test_shared_and_strided_memory(tmp_path: Path) -> None:
    path = trained(Tied(), tmp_path / "x.ckpt")
    done = export(path, tmp_path / "x.safetensors", model_card=False)
    assert done.tied == {"head.weight": "embed.weight"}
    loaded, state = load_file(done.path), state_of(path)
    assert set(loaded) == set(state) - {"head.weight"}
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)
    model = Tied()
    model.rows, model.row = model.rows.clone(), model.row.clone()  # load_model knows tied weights, not parts of others
    load_model(model, done.path)
    assert torch.equal(model.head.weight, state["head.weight"]) and model.head.weight is model.embed.weight


def test_another_dtype(images: str, tmp_path: Path) -> None:
    done = export(images, tmp_path / "x.safetensors", dtype="bfloat16")
    loaded, state = load_file(done.path), state_of(images)
    assert done.dtypes == ("bfloat16",)
    assert torch.equal(loaded["head.weight"], state["head.weight"].bfloat16())
    assert loaded["norm.num_batches_tracked"].dtype is torch.int64
    tied = export(trained(Tied(), tmp_path / "t.ckpt"), tmp_path / "t.safetensors", dtype="float16", model_card=False)
    assert tied.tied == {"head.weight": "embed.weight"}


def test_a_model_checks_the_weights(images: str, tmp_path: Path) -> None:
    done = export(images, tmp_path / "x.safetensors", model=Images)
    assert done.parameters == sum(parameter.numel() for parameter in Images(3).parameters())
    with pytest.raises(CheckpointMismatchError, match=r"(?s)the weights don't belong to Other.*other\.weight"):
        export(images, tmp_path / "y.safetensors", model=Other, force=True)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "x.safetensors"]


# -- which weights -------------------------------------------------------------------------------------------


def test_average_and_running_weights(tmp_path: Path) -> None:
    """The average of EMAWeightAveraging is the state_dict, and the weights of training lie beside it."""
    module = Images()
    path = trained(module, tmp_path / "x.ckpt", epochs=2, callbacks=[torchhal.EMAWeightAveraging(decay=0.5)])
    content = TorchCheckpointIO().load_checkpoint(path)
    for weights, field in ((None, "state_dict"), ("average", "state_dict"), ("running", "current_model_state")):
        done = export(path, tmp_path / f"{weights}.safetensors", weights=weights, model_card=False)
        assert torch.equal(load_file(done.path)["head.weight"], content[field]["head.weight"])
    assert not torch.equal(content["state_dict"]["head.weight"], content["current_model_state"]["head.weight"])
    assert torch.equal(content["state_dict"]["head.weight"], module.head.weight), "the fit left the average in it"


def test_stochastic_average(tmp_path: Path) -> None:
    """In mid-fit the state_dict is the weights of training, and the average is in the callback's state."""
    saver = torchhal.ModelCheckpoint(tmp_path / "kept", every_n_epochs=1, save_top_k=-1)
    swa = torchhal.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    trained(Images(), tmp_path / "end.ckpt", epochs=3, callbacks=[swa, saver], enable_checkpointing=True)
    path = saver.best_model_path
    content = TorchCheckpointIO().load_checkpoint(path)
    (average,) = (
        each["average_model_state"] for each in content["callbacks"].values() if "average_model_state" in each
    )
    done = export(path, tmp_path / "a.safetensors", weights="average", model_card=False)
    loaded = load_file(done.path)
    assert all(torch.equal(loaded[name], value) for name, value in average.items())
    assert torch.equal(loaded["norm.running_mean"], content["state_dict"]["norm.running_mean"])
    assert "batch norms" in done.notes[0]
    done = export(path, tmp_path / "r.safetensors", weights="running", model_card=False)
    assert torch.equal(load_file(done.path)["head.weight"], content["state_dict"]["head.weight"])
    assert not torch.equal(content["state_dict"]["head.weight"], average["head.weight"])


def test_weights_that_are_not_there(images: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="holds no average beside its weights"):
        export(images, tmp_path / "x.safetensors", weights="average")
    assert cli.main(["checkpoint", "consolidate", images, str(tmp_path / "w.ckpt"), "--weights-only"]) == 0
    with pytest.raises(CheckpointMismatchError, match="holds one set of weights"):
        export(tmp_path / "w.ckpt", tmp_path / "x.safetensors", weights="running")
    with pytest.raises(ConfigurationError, match=r"'weights' must be 'average' or 'running'.*'ema'"):
        export(images, tmp_path / "x.safetensors", weights="ema")
    assert os.listdir(tmp_path) == ["w.ckpt"]


# -- the model card ------------------------------------------------------------------------------------------


def test_model_card(images: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    export(images, tmp_path / "x.safetensors", model=Images)
    text = (tmp_path / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "torchhal", "tags": ["pytorch", "torchhal", "safetensors"]}
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1].strip("| ") for line in body.splitlines() if "| " in line
    }
    count = sum(parameter.numel() for parameter in Images(3).parameters())
    assert rows["model"] == "Images" and rows["parameters"] == str(count) and rows["dtype"] == "float32"
    assert rows["epochs"] == "2" and rows["steps"] == "4"
    assert rows["strategy"] == r"single\_device" and rows["precision"] == "32-true" and rows["accelerator"] == "cpu"
    assert rows["torchhal"] == torchhal.__version__ and rows["torch"] == torch.__version__
    assert rows["width"] == "3" and rows["note"] == r"a\|b", "a table's mark in a value"
    metric = TorchCheckpointIO().load_checkpoint(images)["loops"]["results"]["callback_metrics"]["loss"]
    assert float(rows["loss"]) == pytest.approx(float(metric), rel=1e-5)


def test_a_card_of_somebody_else_stays(images: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n")
    with pytest.raises(CheckpointError, match=r"README\.md'.* that no export has written.*--no-model-card"):
        export(images, tmp_path / "x.safetensors", force=True)
    assert os.listdir(tmp_path) == ["README.md"] and (tmp_path / "README.md").read_text() == "# Mine\n"
    export(images, tmp_path / "x.safetensors", model_card=False)


def test_card_of_a_checkpoint_that_tells_little(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(2)}, "run_facts": 3, "loops": [], "hyper_parameters": "x", "epoch": [1]}
    TorchCheckpointIO().save_checkpoint(state, tmp_path / "x.ckpt")
    export(tmp_path / "x.ckpt", tmp_path / "x.safetensors")
    assert "| parameters | 2 with buffers |" in (tmp_path / "README.md").read_text()


# -- refusals ------------------------------------------------------------------------------------------------


def test_existing_files_stay_without_force(images: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        export(images, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_text() == "mine"
    export(images, tmp_path / "x.safetensors", force=True)
    with pytest.raises(CheckpointError, match=r"README\.md' exists already"):
        export(images, tmp_path / "y.safetensors")
    export(images, tmp_path / "y.safetensors", force=True)
    with pytest.raises(CheckpointError, match="is a folder"):
        export(images, tmp_path, format="safetensors", force=True)
    with pytest.raises(ConfigurationError, match="another path than the checkpoint's"):
        export(images, images, format="safetensors", force=True)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"output": "x.bin"}, r"'output' must end in '\.safetensors', '\.pt2' or '\.onnx'"),
        ({"format": "onxx"}, "'format' must be .*did you mean 'onnx'"),
        ({"dtype": "int8"}, "'dtype' must be 'float32'"),
        ({"model": torch.nn.Linear(1, 1)}, "'model' must be the model's class"),
        ({"output": "README.md", "format": "safetensors"}, "must have another name than 'README.md'"),
        ({"output": ""}, "'output' must be a path"),
        ({"force": 1}, "'force' must be"),
    ],
)
def test_arguments(images: str, tmp_path: Path, options: dict[str, Any], words: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigurationError, TypeError), match=words):
        export(images, **{"output": "x.safetensors", **options})
    assert os.listdir(tmp_path) == []


def test_damaged_checkpoint(images: str, tmp_path: Path) -> None:
    whole = Path(images).read_bytes()
    path = tmp_path / "x.ckpt"
    for position in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            export(path, tmp_path / "x.safetensors")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged: cut off"):
        export(path, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="nothing is at"):
        export(tmp_path / "no.ckpt", tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_full_output_leaves_nothing(tmp_path: Path) -> None:
    TorchCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(10_000)}}, tmp_path / "x.ckpt")
    (tmp_path / "out").mkdir()
    program = (
        "import os, resource, signal, sys\nimport torch, safetensors.torch, torchhal.export\n"
        "from torchhal.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "for limit in (0, 100, 3000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    assert main(['export', *sys.argv[1:]]) == 2\n"
        "    assert os.listdir(os.path.dirname(sys.argv[2])) == []\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "x.ckpt"), str(tmp_path / "out/x.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("could not be saved") == 3 and done.stderr.count("\n") == 3


def test_output_that_can_not_be_written(images: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be saved"):
        export(images, tmp_path / "file" / "x.safetensors")
    assert os.listdir(tmp_path) == ["file"]


def test_without_safetensors(images: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigurationError, match=r"pip install torchhal\[export\]"):
        export(tmp_path / "not read.ckpt", tmp_path / "x.safetensors")


# -- other places and the command ----------------------------------------------------------------------------


def test_urls(images: str, tmp_path: Path) -> None:
    io = TorchCheckpointIO()
    io.save_checkpoint(io.load_checkpoint(images), "memory://export/x.ckpt")
    export("memory://export/x.ckpt", "memory://export/out/x.safetensors")
    import fsspec

    files = fsspec.filesystem("memory")
    assert sorted(os.path.basename(name) for name in files.ls("/export/out", detail=False)) == [
        "README.md",
        "x.safetensors",
    ]
    (tmp_path / "x.safetensors").write_bytes(files.cat_file("/export/out/x.safetensors"))
    assert torch.equal(load_file(tmp_path / "x.safetensors")["head.weight"], state_of(images)["head.weight"])
    with pytest.raises(CheckpointError, match="exists already"):
        export("memory://export/x.ckpt", "memory://export/out/x.safetensors")
    assert cli.main(["checkpoint", "consolidate", images, "memory://export/c.safetensors"]) == 0
    assert files.exists("/export/c.safetensors")


def test_command(images: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "x.safetensors")
    assert cli.main(["export", images, target]) == 0
    out, _ = capfd.readouterr()
    assert out.startswith(f"wrote {target} (safetensors, ")
    assert cli.main(["export", images, target]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
