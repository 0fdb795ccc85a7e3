"""Checkpoints and exports behind s3:// URLs, on a server of moto's that speaks S3 over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from export_models import Images, trained

from torchhal import ModelCheckpoint, Trainer, cli
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointCorruptError, CheckpointError
from torchhal.export import export

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A file system of s3fs with an empty bucket, ``s3://torchhal``."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("torchhal")
    yield files
    files.invalidate_cache()
    files.rm("torchhal", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def names(bucket: Any) -> list[str]:
    bucket.invalidate_cache()
    return sorted(name.removeprefix("torchhal/") for name in bucket.find("torchhal"))


def test_save_load_list_remove(bucket: Any) -> None:
    io = TorchCheckpointIO()
    state = {"w": torch.randn(300_000), "epoch": 1}
    for number in range(2):
        io.save_checkpoint({**state, "epoch": number}, f"s3://torchhal/run/{number}.ckpt")
    io.save_checkpoint(state, "s3://torchhal/run/0.ckpt")
    assert names(bucket) == ["run/0.ckpt", "run/1.ckpt"]
    assert io.list_checkpoints("s3://torchhal/run") == ["s3://torchhal/run/1.ckpt", "s3://torchhal/run/0.ckpt"]
    loaded = io.load_checkpoint("s3://torchhal/run/0.ckpt")
    assert torch.equal(loaded["w"], state["w"]) and loaded["epoch"] == 1
    assert io.exists("s3://torchhal/run/0.ckpt") and io.recognizes("s3://torchhal/run/0.ckpt")
    io.remove_checkpoint("s3://torchhal/run/0.ckpt")
    assert not io.exists("s3://torchhal/run/0.ckpt") and names(bucket) == ["run/1.ckpt"]
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint("s3://torchhal/run/0.ckpt")


def test_failed_save_keeps_the_old_checkpoint(bucket: Any) -> None:
    class Poison:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("poison")

    io = TorchCheckpointIO()
    io.save_checkpoint({"w": torch.ones(3)}, "s3://torchhal/x.ckpt")
    with pytest.raises(CheckpointError, match="poison"):
        io.save_checkpoint({"w": torch.ones(200_000), "p": Poison()}, "s3://torchhal/x.ckpt")
    assert names(bucket) == ["x.ckpt"]
    assert torch.equal(io.load_checkpoint("s3://torchhal/x.ckpt")["w"], torch.ones(3))


def test_flipped_bit(bucket: Any) -> None:
    io = TorchCheckpointIO()
    io.save_checkpoint({"w": torch.ones(300)}, "s3://torchhal/x.ckpt")
    whole = bucket.cat_file("torchhal/x.ckpt")
    middle = len(whole) // 2
    bucket.pipe_file("torchhal/x.ckpt", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(CheckpointCorruptError):
        io.load_checkpoint("s3://torchhal/x.ckpt")


def test_resumed_run_equals_one_without_interruption(bucket: Any) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": "s3://torchhal/runs",
    }  # fmt: skip
    data = [[part] for part in torch.randn(4, 2, 3, 6, 6)]

    def fit(epochs: int, ckpt_path: str | None = None, **more: Any) -> Images:
        torch.manual_seed(3)
        module = Images()
        saver = ModelCheckpoint("s3://torchhal/kept", save_last=True, save_top_k=-1, filename="{epoch}")
        Trainer(max_epochs=epochs, callbacks=saver, **options).fit(module, data, ckpt_path=ckpt_path)
        return module

    fit(1)
    assert {"kept/last.ckpt"} < set(names(bucket)) and not any("torchhal-tmp" in name for name in names(bucket))
    resumed = fit(2, "last")
    whole = fit(2)
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_export_from_and_to_a_bucket(bucket: Any, tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    path = trained(Images(), tmp_path / "x.ckpt")
    assert cli.main(["checkpoint", "consolidate", path, "s3://torchhal/x.ckpt", "--weights-only"]) == 0
    export("s3://torchhal/x.ckpt", "s3://torchhal/out/x.pt2", model=Images)
    assert names(bucket) == ["out/README.md", "out/x.pt2", "x.ckpt"]
    bucket.get_file("torchhal/out/x.pt2", str(tmp_path / "x.pt2"))
    batch = torch.randn(5, 3, 6, 6)
    expected = Images.load_from_checkpoint(path).eval()(batch)
    torch.testing.assert_close(torch.export.load(tmp_path / "x.pt2").module()(batch), expected)
    assert (
        cli.main(["export", "s3://torchhal/x.ckpt", "s3://torchhal/out/x.pt2", "--model", "export_models:Images"]) == 2
    )
    assert "exists already" in capfd.readouterr().err
