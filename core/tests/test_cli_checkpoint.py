"""torchhal checkpoint inspect and consolidate, on the core's own files and on a part that writes folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Trainer, cli, registry
from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.errors import CheckpointError
from torchhal.testing import isolated_registry


class Tied(torchhal.Module):
    """A weight of two names, one of a part of the other's memory, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rows", self.embed.weight.detach()[:2])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.embed(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tied(), DataLoader(TensorDataset(torch.arange(6)), 2))
    trainer.save_checkpoint(folder / "x.ckpt")
    return str(folder / "x.ckpt")


def failure(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["checkpoint", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, "one line"
    return err.removeprefix("error: ")


# -- inspect -------------------------------------------------------------------------------------------------


def test_inspect_as_json(saved: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "inspect", saved, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    tensors = {tensor.pop("name"): tensor for tensor in found.pop("tensors")}
    contents = found.pop("contents")
    assert {"state_dict", "optimizer_states", "loops", "ranks"} <= set(contents)
    assert tensors["state_dict/embed.weight"] == {"shape": [6, 4], "dtype": "float32", "bytes": 96}
    assert tensors["state_dict/head.weight"]["bytes"] == 96
    assert tensors["optimizer_states/0/state/0/exp_avg"] == {"shape": [6, 4], "dtype": "float32", "bytes": 96}
    listed = sum(tensor["bytes"] for tensor in tensors.values())
    assert found == {
        "schema": 1,
        "path": saved,
        "checkpoint_io": "torch",
        "torchhal_version": torchhal.__version__,
        "epoch": 2,
        "global_step": 6,
        "world_size": 1,
        "optimizers": 1,
        "bytes": listed - 96,
    }, "tied weights count once"


def test_inspect_as_text(saved: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "inspect", saved]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "step           6" in lines and "world_size     1" in lines
    (row,) = (line.split() for line in lines if line.startswith("state_dict/embed.weight"))
    assert row[1:] == ["(6,", "4)", "float32", "96"]


def test_one_long_name_does_not_widen_the_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(2), "x" * 300: torch.ones(2)}, tmp_path / "x.pt")
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "x.pt")]) == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if "float32" in line]
    assert sorted(map(len, rows)) == [77, 317]


def test_inspect_of_what_plain_torch_wrote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "x.pt")
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "x.pt"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["tensors"] == [{"name": "w", "shape": [2, 3], "dtype": "bfloat16", "bytes": 12}]
    assert found["epoch"] is None and found["world_size"] is None


def test_inspect_loads_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "large.ckpt"
    TorchCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(64 << 20)}}, path)
    limited = (
        "import resource, sys\nfrom torchhal import cli\nimport torch, torchhal.trainer\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert cli.main(['checkpoint', 'inspect', sys.argv[1]]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", limited, path], capture_output=True, text=True, check=True)
    assert "256.0 MiB" in done.stdout
    assert int(done.stdout.splitlines()[-1]) < 64 << 10, "kB, of a file of 256 MB"


# -- what can't be inspected ---------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "nothing is at" in failure(capfd, "inspect", str(tmp_path / "no.ckpt"))
    assert "no checkpoint is at 'memory://no/x.ckpt'" in failure(capfd, "inspect", "memory://no/x.ckpt")
    assert "'path' must name a" in failure(capfd, "inspect", "")
    assert "'path' must name a" in failure(capfd, "consolidate", "", str(tmp_path / "x.ckpt"))


def test_no_checkpoint(tmp_path: Path, saved: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "empty.ckpt").touch()
    assert "is no checkpoint" in failure(capfd, "inspect", str(tmp_path / "text.ckpt"))
    assert "is empty" in failure(capfd, "inspect", str(tmp_path / "empty.ckpt"))
    assert "is a folder without a checkpoint" in failure(capfd, "inspect", str(tmp_path))
    message = failure(capfd, "inspect", os.path.dirname(saved))
    assert "is a folder with 1 checkpoint(s) in it" in message and saved in message


def test_damage(tmp_path: Path, saved: str, capfd: pytest.CaptureFixture[str]) -> None:
    whole = Path(saved).read_bytes()
    path = tmp_path / "x.ckpt"
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged: cut off" in failure(capfd, "inspect", str(path))
    at = whole.index(b"state_dict")
    path.write_bytes(whole[:at] + b"S" + whole[at + 1 :])
    assert "is damaged" in failure(capfd, "inspect", str(path))
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert cli.main(["checkpoint", "consolidate", str(path), str(tmp_path / "y.ckpt")]) == 2
        assert not (tmp_path / "y.ckpt").exists()
    capfd.readouterr()


@pytest.mark.parametrize(
    "name, owner",
    [
        (".metadata", "torchhal-parallel"),
        ("__0_0.distcp", "torchhal-parallel"),
        ("zero_to_fp32.py", "torchhal-deepspeed"),
    ],
)
def test_a_plugin_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, owner: str) -> None:
    (tmp_path / name).write_text("x")
    with isolated_registry():
        assert f"pip install {owner}" in failure(capfd, "inspect", str(tmp_path))


# -- a part that writes folders ------------------------------------------------------------------------------


class Later:
    """Stands for a tensor that lies in the folder."""

    def __init__(self, path: Path, shape: torch.Size, dtype: torch.dtype) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype

    def read(self) -> torch.Tensor:
        found: torch.Tensor = torch.load(self.path)
        return found


class FolderIO(CheckpointIO):
    """A tensor a file."""

    features = frozenset({"sharded"})

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *, storage_options: Any = None) -> None:
        os.makedirs(path)
        content: dict[str, Any] = {**checkpoint, "state_dict": {}}
        for name, tensor in checkpoint["state_dict"].items():
            torch.save(tensor, Path(path) / name)
            content["state_dict"][name] = [list(tensor.shape), str(tensor.dtype)]
        (Path(path) / "content.json").write_text(json.dumps(content))

    def open_checkpoint(self, path: Any) -> dict[str, Any]:
        content = json.loads((Path(path) / "content.json").read_text())
        state = content["state_dict"]
        for name, (shape, dtype) in state.items():
            kind = getattr(torch, dtype.removeprefix("torch."))
            state[name] = Later(Path(path) / name, torch.Size(shape), kind)
        return dict(content)

    def load_checkpoint(self, path: Any, *, map_location: Any = "cpu", weights_only: bool = True) -> dict[str, Any]:
        raise AssertionError("opened, not loaded")

    def exists(self, path: Any) -> bool:
        return (Path(path) / "content.json").is_file()

    def list_checkpoints(self, folder: Any) -> list[str]:
        return []


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    with isolated_registry():
        registry.register("checkpoint_io", "folders", FolderIO)
        state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
        content = {"state_dict": state, "epoch": 3, "global_step": 7, "ranks": [{}, {}], "optimizer_states": []}
        FolderIO().save_checkpoint(content, tmp_path / "many")
        yield str(tmp_path / "many")


def test_another_part_recognises_its_own(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "inspect", folder, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["checkpoint_io"], found["world_size"], found["epoch"], found["bytes"]) == ("folders", 2, 3, 30)
    assert cli.main(["checkpoint", "consolidate", folder, f"{folder}.ckpt"]) == 0
    loaded = TorchCheckpointIO().load_checkpoint(f"{folder}.ckpt")
    assert torch.equal(loaded["state_dict"]["w"], torch.arange(6.0).view(2, 3)) and len(loaded["ranks"]) == 2
    assert cli.main(["checkpoint", "consolidate", folder, f"{folder}-w.ckpt", "--weights-only"]) == 0
    assert list(TorchCheckpointIO().load_checkpoint(f"{folder}-w.ckpt")) == ["state_dict", "epoch", "global_step"]


# -- consolidate ---------------------------------------------------------------------------------------------


def test_a_torch_file_again(saved: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "weights.ckpt"
    assert cli.main(["checkpoint", "consolidate", saved, str(target), "--weights-only"]) == 0
    assert capfd.readouterr().out == f"wrote {target}\n"
    loaded = TorchCheckpointIO().load_checkpoint(target)
    assert loaded["global_step"] == 6 and "optimizer_states" not in loaded
    assert loaded["state_dict"]["embed.weight"].data_ptr() == loaded["state_dict"]["head.weight"].data_ptr()
    module = Tied.load_from_checkpoint(target)
    assert torch.equal(module.head.weight, TorchCheckpointIO().load_checkpoint(saved)["state_dict"]["head.weight"])


def test_an_existing_target_is_not_replaced(saved: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "x.ckpt"
    target.write_text("mine")
    assert "exists already" in failure(capfd, "consolidate", saved, str(target))
    assert target.read_text() == "mine"
    assert cli.main(["checkpoint", "consolidate", saved, str(target), "--force"]) == 0
    assert TorchCheckpointIO().exists(target)


def test_safetensors(saved: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import safetensors
    from safetensors.torch import load_file, load_model

    target = str(tmp_path / "x.safetensors")
    assert cli.main(["checkpoint", "consolidate", saved, target]) == 0
    assert "head.weight is in it as embed.weight" in capfd.readouterr().out
    state = TorchCheckpointIO().load_checkpoint(saved)["state_dict"]
    loaded = load_file(target)
    assert sorted(loaded) == ["embed.weight", "rows"]
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata() == {
            "format": "pt", "head.weight": "embed.weight", "epoch": "2", "global_step": "6",
            "torchhal_version": torchhal.__version__,
        }  # fmt: skip
    module = Tied()
    module.rows = module.rows.clone()  # load_model knows tied weights, not parts of others
    load_model(module, str(target))
    assert torch.equal(module.head.weight, state["head.weight"]), "tied again"
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_what_safetensors_can_not_hold(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for value, words in (({"a": 1}, "is a dict"), (torch.eye(2).to_sparse(), "layout torch.sparse_coo")):
        TorchCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(1), "extra": value}}, tmp_path / "x.ckpt")
        message = failure(capfd, "consolidate", str(tmp_path / "x.ckpt"), str(tmp_path / "x.safetensors"))
        assert "'extra'" in message and words in message
    TorchCheckpointIO().save_checkpoint({"w": torch.ones(1)}, tmp_path / "y.ckpt")
    message = failure(capfd, "consolidate", str(tmp_path / "y.ckpt"), str(tmp_path / "y.safetensors"))
    assert "has no 'state_dict'" in message
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt", "y.ckpt"]


def test_without_safetensors(saved: str, tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    message = failure(capfd, "consolidate", saved, str(tmp_path / "x.safetensors"))
    assert "pip install torchhal[safetensors]" in message


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_one_copy_in_memory(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "large.ckpt"
    state = {f"w{i}": torch.zeros(4 << 20) for i in range(16)}
    TorchCheckpointIO().save_checkpoint({"state_dict": state}, path)
    code = (
        "import resource, sys\nfrom torchhal import cli\nimport torch, torchhal.trainer, safetensors.torch\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert cli.main(['checkpoint', 'consolidate', *sys.argv[1:]]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, path, tmp_path / f"y.{ending}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < (256 + 100) << 10, "kB, of weights of 256 MB"


def test_open_checkpoint_reads_from_the_file(saved: str) -> None:
    opened, loaded = TorchCheckpointIO().open_checkpoint(saved), TorchCheckpointIO().load_checkpoint(saved)
    assert list(opened) == list(loaded)
    assert torch.equal(opened["state_dict"]["embed.weight"], loaded["state_dict"]["embed.weight"])
    with pytest.raises(FileNotFoundError):
        TorchCheckpointIO().open_checkpoint(f"{saved}.no")
    with pytest.raises(CheckpointError, match="is a folder"):
        TorchCheckpointIO().open_checkpoint(os.path.dirname(saved))
    io = TorchCheckpointIO()
    io.save_checkpoint({"w": torch.ones(3)}, "memory://opened/x.ckpt")
    assert io.open_checkpoint("memory://opened/x.ckpt")["w"].sum() == 3
