"""A stdout or stderr that is full, closed, or not read ends no training, and no status but that of the training."""

import io
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from tiers import slow

from torchhal.trainer.logging import _standard_streams as standard_streams
from torchhal.trainer.logging._standard_streams import LossyStream, lossy_streams

LINE = "x" * 200 + "\n"


@pytest.fixture
def full():
    with open("/dev/full", "w") as file:
        yield file


@pytest.fixture
def pipe():
    """The descriptor to read from, and the stream of one that is not waited for when it is full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stream = os.fdopen(writing, "w")
    yield reading, stream
    stream.close()
    os.close(reading)


@pytest.mark.parametrize("text", ["short", "lines\n" * 3, "more than a buffer" * 1000])
def test_output_dropped_on_full_disk(full, text, capsys):
    """Output that a full disk no longer takes is dropped, with one line on stderr."""
    stream = LossyStream(full, "stdout")
    for _ in range(2):
        assert stream.write(text) == len(text)
        stream.flush()
    full.close()  # which raises if anything is left to write
    said = "torchhal: stdout can't be written (No space left on device): what is printed there is lost\n"
    assert capsys.readouterr().err == said


def test_a_stream_that_is_closed_is_none(tmp_path):
    stream = LossyStream(open(tmp_path / "file", "w"), "stderr")  # noqa: SIM115
    stream.close()
    assert stream.write("text") == 4
    stream.flush()


def test_an_error_of_the_text_is_still_one(tmp_path):
    with open(tmp_path / "file", "w", encoding="ascii") as file, pytest.raises(UnicodeEncodeError):
        LossyStream(file, "stdout").write("ä")


def test_stream_with_only_write():
    """A stand-in for a stream may have a write alone."""

    class StandIn:
        def write(self, text):
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        LossyStream(StandIn(), "stdout").write("x")


def test_a_reader_who_is_slow_gets_everything(pipe):
    reading, stream = pipe
    read = []

    def slowly():
        while chunk := os.read(reading, 50_000):
            read.append(chunk)
            time.sleep(0.01)

    thread = threading.Thread(target=slowly)
    thread.start()
    lossy = LossyStream(stream, "stdout")
    for _ in range(2000):
        lossy.write(LINE)
        lossy.flush()
    stream.close()
    thread.join(30)
    assert b"".join(read).decode() == LINE * 2000


def test_stuck_reader_is_awaited_once(pipe, monkeypatch):
    """A reader that never reads is waited for once."""
    _, stream = pipe
    monkeypatch.setattr(standard_streams, "PATIENCE", 0.3)
    waits = []
    choose = standard_streams.select.select
    monkeypatch.setattr(standard_streams.select, "select", lambda *a: (waits.append(a[3]), choose(*a))[1])
    lossy = LossyStream(stream, "stderr")
    for _ in range(2000):
        lossy.write(LINE)
        lossy.flush()
    assert 0 < sum(waits) <= 2 * 0.3  # select may return a little early


def test_streams_are_lossy_inside_only(monkeypatch):
    out, err = io.StringIO(), sys.stderr
    monkeypatch.setattr(sys, "stdout", out)
    with lossy_streams():
        mine = sys.stdout
        with lossy_streams():
            assert sys.stdout is mine
        print("said")
        assert not sys.stdout.isatty() and sys.stderr is not err
    assert (sys.stdout, sys.stderr) == (out, err)
    assert out.getvalue() == "said\n"
    monkeypatch.setattr(sys, "stdout", None)
    with lossy_streams():
        assert sys.stdout is None


TRAIN = """
import json, os, sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchhal

folder, strategy = sys.argv[1:]


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        print("x" * 500)
        print("a step", file=sys.stderr)
        self.print("a step")
        warnings.warn(f"step {self.global_step}")
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    devices = 1 if strategy == "auto" else 2
    data = DataLoader(TensorDataset(torch.ones(64, 4)), 4)
    trainer = torchhal.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, default_root_dir=folder
    )
    trainer.fit(Net(), data, data)
    trainer.validate(dataloaders=data)
    outcome = {"steps": trainer.global_step, "stderr": os.readlink("/proc/self/fd/2")}
    with open(f"{folder}/outcome{trainer.global_rank}.json", "w") as file:
        json.dump(outcome, file)
"""


@pytest.fixture
def train(tmp_path):
    """Run TRAIN with the shell's redirections; its exit code, and what each rank noted."""

    def train(strategy, redirections):
        (tmp_path / "train.py").write_text(TRAIN)
        command = f'exec "$0" train.py "{tmp_path}" {strategy} {redirections}'
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            ["bash", "-c", command, sys.executable], cwd=tmp_path, env={**environ, "OMP_NUM_THREADS": "1"},
            timeout=120, check=False, capture_output=True, text=True,
        )  # fmt: skip
        outcomes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("outcome*.json"))]
        return done, outcomes

    return train


@pytest.mark.parametrize(
    ("strategy", "redirections"),
    [
        ("auto", ">/dev/full 2>/dev/full"),
        slow("auto", ">/dev/full"),
        slow("auto", "> >(true) 2> >(true)"),  # nobody reads: EPIPE
        slow("auto", ">&- 2>&-"),
        slow("auto", "2>&-"),
        slow("ddp", ">/dev/full 2>/dev/full"),
        slow("ddp", "> >(true) 2> >(true)"),
        slow("ddp", ">&- 2>&-"),
        slow("ddp_spawn", ">/dev/full 2>/dev/full"),
        slow("ddp_fork", ">&- 2>&-"),
    ],
)
def test_a_training_goes_on_to_its_end(train, tmp_path, strategy, redirections):
    done, outcomes = train(strategy, redirections)
    assert done.returncode == 0, done.stderr
    ranks = 2 if strategy == "ddp" else 1
    assert [outcome["steps"] for outcome in outcomes] == [32 if strategy == "auto" else 16] * ranks
    if "2>&-" in redirections:
        assert all(outcome["stderr"] == "/dev/null" for outcome in outcomes)  # and no file of the run
    if redirections == ">/dev/full":
        assert "torchhal: stdout can't be written (No space left on device)" in done.stderr
    assert list(tmp_path.rglob("*.ckpt"))
