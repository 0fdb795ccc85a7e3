"""torchhal.export by torch.export and to ONNX: what the files compute, and models and inputs that don't fit."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_models import Dice, FixedBatch, Images, Other, Tied, trained

from torchhal import cli
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointMismatchError, ConfigurationError, ModelError, TorchhalError
from torchhal.export import export


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(Images(3), tmp_path_factory.mktemp("images") / "x.ckpt", epochs=2)


def onnx_session(path: Any) -> Any:
    return pytest.importorskip("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])


# -- what the files compute ----------------------------------------------------------------------------------


def test_program_computes_what_the_module_does(images: str, tmp_path: Path) -> None:
    """In evaluation mode, at any batch size, with the values of the example without effect."""
    done = export(images, tmp_path / "x.pt2", model=Images)
    loaded: Any = torch.export.load(done.path).module()
    reference = Images.load_from_checkpoint(images).eval()
    for size in (1, 2, 7):
        batch = torch.randn(size, 3, 6, 6)
        torch.testing.assert_close(loaded(batch), reference(batch))
    assert done.batch_sizes == (1, 3) and done.max_difference is not None and done.max_difference < 1e-6
    facts: dict[str, Any] = {"torchhal.json": ""}
    torch.export.load(done.path, extra_files=facts)
    assert json.loads(facts["torchhal.json"])["global_step"] == "4"
    assert "at most" in (tmp_path / "README.md").read_text()


def generator_states() -> Any:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), (name, list(keys), *rest)


def drawing(width: int) -> Images:
    """Return a model whose construction draws from every generator."""
    random.random(), np.random.rand()
    return Images(width)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt2", "x.onnx"])
def test_random_state_is_as_before(images: str, tmp_path: Path, name: str) -> None:
    """After an export, and after one that fails, the caller's generators go on where they were."""
    for package in {"x.safetensors": ["safetensors"], "x.onnx": ["onnxscript"]}.get(name, []):
        pytest.importorskip(package)
    before = generator_states()
    export(images, tmp_path / name, model=drawing, model_args={"width": 3})
    assert generator_states() == before
    with pytest.raises(TorchhalError):
        export(images, tmp_path / name, model=drawing, model_args={"width": 4}, force=True)
    assert generator_states() == before


def test_onnx_computes_what_the_module_does(images: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    done = export(images, tmp_path / "x.onnx", model=Images)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "x.onnx"]
    session = onnx_session(done.path)
    (given,) = session.get_inputs()
    assert given.name == "x" and given.shape == ["batch", 3, 6, 6]
    assert session.get_modelmeta().custom_metadata_map["global_step"] == "4"
    reference = Images.load_from_checkpoint(images).eval()
    for size in (1, 5):
        batch = torch.randn(size, 3, 6, 6)
        (computed,) = session.run(None, {"x": batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(computed), reference(batch), rtol=1e-4, atol=1e-5)
    assert done.max_difference is not None and done.max_difference < 1e-4


@pytest.mark.slow
def test_several_inputs_and_nested_outputs(tmp_path: Path) -> None:
    path = trained(Tied(), tmp_path / "x.ckpt")
    reference = Tied.load_from_checkpoint(path).eval()
    inputs = ["int64[1,5]", "scale=float32[1,1,1]"]
    tokens, scale = torch.randint(0, 6, (4, 5)), torch.randn(4, 1, 1)
    expected = reference(tokens, scale)
    done = export(path, tmp_path / "x.pt2", example_input=inputs, model_card=False)  # the class is imported
    computed = torch.export.load(done.path).module()(tokens, scale=scale)
    torch.testing.assert_close(computed, expected)
    example = (torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 1, 1))
    export(path, tmp_path / "y.pt2", model=Tied, example_input=example, model_card=False)
    named = {"tokens": example[0], "scale": example[1]}
    export(path, tmp_path / "z.pt2", model=Tied, example_input=named, model_card=False)
    pytest.importorskip("onnxscript")
    done = export(path, tmp_path / "x.onnx", example_input=inputs, model_card=False)
    session = onnx_session(done.path)
    values = session.run(None, {"tokens": tokens.numpy(), "scale": scale.numpy()})
    torch.testing.assert_close(torch.from_numpy(values[0]), expected["logits"], rtol=1e-4, atol=1e-5)


def test_weights_keep_their_dtype(tmp_path: Path) -> None:
    """A model in double precision isn't rounded to the single precision in which its class builds it."""
    path = trained(Images(), tmp_path / "x.ckpt", precision="64-true")
    with pytest.raises(ModelError, match=r"forward raised RuntimeError .*in the dtype of the weights"):
        export(path, tmp_path / "x.pt2", model=Images)
    export(path, tmp_path / "x.pt2", model=Images, example_input="float64[1,3,6,6]")
    state = torch.export.load(tmp_path / "x.pt2").state_dict
    assert torch.equal(state["head.weight"], TorchCheckpointIO().load_checkpoint(path)["state_dict"]["head.weight"])
    export(path, tmp_path / "y.pt2", model=Images, dtype="float32", model_card=False)
    assert torch.export.load(tmp_path / "y.pt2").state_dict["head.weight"].dtype is torch.float32


def test_fixed_shapes(tmp_path: Path) -> None:
    path = trained(Other(), tmp_path / "x.ckpt", limit_train_batches=0)
    content = TorchCheckpointIO().load_checkpoint(path)
    content["state_dict"] = FixedBatch().state_dict()
    TorchCheckpointIO().save_checkpoint(content, path)
    options: dict[str, Any] = {"model": FixedBatch, "example_input": "float32[2,4]", "model_card": False}
    with pytest.raises(ModelError, match=r"FixedBatch.*--fixed-shapes"):
        export(path, tmp_path / "x.pt2", **options)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    done = export(path, tmp_path / "x.pt2", dynamic_batch=False, **options)
    assert done.batch_sizes == () and done.max_difference == 0


def test_a_file_that_computes_something_else_is_not_written(images: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"differs from the module by .* random numbers"):
        export(images, tmp_path / "x.pt2", model=Dice)
    assert os.listdir(tmp_path) == []


# -- models and inputs ---------------------------------------------------------------------------------------


def make(width: int, depth: int = 1) -> Images:
    return Images(width)


def test_hyperparameters_build_the_model(images: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"(?s)the weights don't belong to Images.*size mismatch"):
        export(images, tmp_path / "x.pt2", model=Images, model_args={"width": 5})
    with pytest.raises(CheckpointMismatchError, match="the weights don't belong to Other"):
        export(images, tmp_path / "x.pt2", model=Other, example_input="float32[1,2]")
    with pytest.raises(ModelError, match=r"Images.*can't be called with 'model_args' \{'height': 2\}"):
        export(images, tmp_path / "x.pt2", model=Images, model_args={"height": 2})
    with pytest.raises(ModelError, match=r"must be, or return, an nn\.Module"):
        export(images, tmp_path / "x.pt2", model=lambda: 3)  # type: ignore[arg-type, return-value]
    assert os.listdir(tmp_path) == []
    export(images, tmp_path / "x.pt2", model=make, model_args=[3], example_input="float32[1,3,6,6]")


def test_the_class_of_the_checkpoint_is_not_imported(images: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A file must not choose what runs; the message has the words that a user adds."""
    monkeypatch.delitem(sys.modules, "export_models")
    with pytest.raises(ConfigurationError, match=r"--model export_models:Images"):
        export(images, tmp_path / "x.pt2")
    content = TorchCheckpointIO().load_checkpoint(images)
    for target in ("subprocess:Popen", "os:system", "no colon", 3):
        content["run_facts"]["model"] = target
        TorchCheckpointIO().save_checkpoint(content, tmp_path / "y.ckpt")
        with pytest.raises(ConfigurationError, match="'model' must be given"):
            export(tmp_path / "y.ckpt", tmp_path / "x.pt2")


@pytest.mark.parametrize(
    "given, words",
    [
        ("float32", "must be a dtype and a shape"),
        ("float33[1,2]", r"must begin with a dtype of torch.*did you mean 'float32'"),
        ("float32[1,-3]", "sizes of at least 1"),
        ("float32[0,3]", "sizes of at least 1"),
        ("float32[1,3", "must be a dtype and a shape"),
        ("float32[99999999,99999999]", "fits into memory"),
        (["float32[1,3,6,6]", "float32[1]"], r"must fit Images\.forward\(x.*too many positional"),
        ("y=float32[1,3,6,6]", r"must fit Images\.forward\(x"),
        ("float32[1,4,6,6]", r"forward raised RuntimeError for the input float32\[3,4,6,6\]"),
        ("float32[]", "must have a tensor with a dimension"),
        ([1], "must be a tensor, a tuple"),
        ([], "must be a tensor, a tuple"),
        (3, "must be a tensor, a tuple"),
    ],
)
def test_inputs(images: str, tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises(TorchhalError, match=words):
        export(images, tmp_path / "x.pt2", model=Images, example_input=given)
    assert os.listdir(tmp_path) == []


def test_no_input_and_no_forward(images: str, tmp_path: Path) -> None:
    path = trained(Tied(), tmp_path / "x.ckpt")
    with pytest.raises(ConfigurationError, match=r"Tied has no example_input_array.*--input"):
        export(path, tmp_path / "x.pt2", model=Tied)

    class NoForward(Images):
        forward = torch.nn.Module.forward

    with pytest.raises(ModelError, match="must have a forward"):
        export(images, tmp_path / "x.pt2", model=NoForward)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_without_onnx(tmp_path: Path, monkeypatch: Any, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigurationError, match=r"pip install torchhal\[export\]"):
        export(tmp_path / "not read.ckpt", tmp_path / "x.onnx", model=Images)


@pytest.mark.slow
def test_without_onnxruntime(images: str, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = export(images, tmp_path / "x.onnx", model=Images)
    assert done.max_difference is None and "onnxruntime is not installed" in done.notes[0]
    assert "onnxruntime is not installed" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_large_weights_are_a_second_file(images: str, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("torchhal.export._onnx_file.ONE_FILE", 100)
    done = export(images, tmp_path / "x.onnx", model=Images)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "x.onnx", "x.onnx.data"]
    assert onnx_session(done.path) is not None


def test_command(images: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "x.pt2")
    shell = ["export", images, target, "--model", "export_models:Images", "--input", "float32[1,3,6,6]"]
    assert cli.main([*shell, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["schema"], found["format"], found["batch_sizes"]) == (1, "torch_export", [1, 3])
    assert cli.main([*shell, "--force", "--model-args", "{"]) == 2
    assert "'--model-args' must be JSON" in capfd.readouterr().err
    assert cli.main(["export", images, target, "--force", "--model", "export_models:Nothing"]) == 2
    assert "'--model'" in capfd.readouterr().err
