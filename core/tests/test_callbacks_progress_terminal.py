"""ProgressBar and RichProgress on a terminal: what it shows, what else is printed on it, and that nothing stays."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pickle
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
import torch
from quiet_trainer import make
from terminal_screen import screen
from tiers import slow
from torch import nn

from torchhal import Callback, Module, Trainer, registry
from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import ModelSummary, ProgressBar, RichProgress
from torchhal.trainer.callbacks._progress_lines import ProgressLines
from torchhal.trainer.callbacks._terminal_lines import LinesAbove

pytest.importorskip("rich")

BATCHES = [torch.ones(3, 2) for _ in range(4)]
WIDTH = 80
BOTH = pytest.mark.parametrize("kind", [ProgressBar, RichProgress])
TITLE = {ProgressBar: "Epoch 0:", RichProgress: "Epoch 0 "}


class Net(Module):
    def __init__(self, say=lambda module, batch_idx: None, **values):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.say, self.values = say, values

    def training_step(self, batch, batch_idx):
        self.say(self, batch_idx)
        self.log_dict({"loss": 0.25, **self.values}, prog_bar=True)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("score", 0.5, prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Terminal(io.StringIO):
    """A terminal as a stream, of which the test sees what was drawn at any time; inside it is stdout and stderr."""

    def __enter__(self):
        self.before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self
        return self

    def __exit__(self, *error):
        self.after = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self.before

    def isatty(self):
        return True

    def lines(self):
        return screen(self.getvalue())[0]


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns."""
    for name, value in {"COLUMNS": str(WIDTH), "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.fixture
def often(monkeypatch):
    """Each batch is drawn."""
    monkeypatch.setattr("torchhal.trainer.callbacks.progress._INTERVAL_S", 0.0)


def bars(terminal):
    """Return the lines of the terminal but those that the Trainer says."""
    return [line for line in terminal.lines() if line and not line.startswith("torchhal: ")]


def test_takes_the_place_of_the_progress_bar():
    for callback in ("rich_progress", RichProgress(), {"rich_progress": {"leave": True}}):
        trainer = Trainer(accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
        assert isinstance(trainer.progress_bar_callback, RichProgress)
        assert sum(isinstance(each, ProgressBar) for each in trainer.callbacks) == 1


def test_a_strangers_bar_and_summary_take_the_place_of_the_trainers():
    class Bar(Callback):
        replaces = "progress_bar"

    class Summary(Callback):
        replaces = "model_summary"

    kinds = [type(callback) for callback in Trainer(accelerator="cpu", callbacks=[Bar(), Summary()]).callbacks]
    assert kinds[:2] == [Bar, Summary] and ProgressBar not in kinds and ModelSummary not in kinds


def test_two_bars_are_refused():
    with pytest.raises(ConfigurationError, match=r"one progress bar at most \(got ProgressBar, RichProgress\)"):
        Trainer(accelerator="cpu", callbacks=["progress_bar", "rich_progress"])


def test_threads_that_print_lose_nothing():
    class Text(str):
        def __radd__(self, begun):
            time.sleep(0)  # lets another thread in, between what was kept and what is
            return begun + str(self)

    written = io.StringIO()
    above = LinesAbove(written, lambda: "")

    def write(name):
        for number in range(1000):
            above.write(Text(f"<{name}:{number}>"))
            above.write(Text("\n"))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    above.close()
    found = sorted(re.findall(r"<\d:\d+>", written.getvalue()))
    assert found == sorted(f"<{name}:{number}>" for name in range(4) for number in range(1000))


def test_what_stays_on_a_terminal(terminal):
    trainer = make(RichProgress(), max_epochs=2, num_sanity_val_steps=1)
    with terminal:
        trainer.fit(Net(), BATCHES, BATCHES)
        trainer.test(dataloaders=BATCHES, verbose=False)
    epoch, values, testing, score = bars(terminal)
    assert epoch.startswith("Epoch 1 100% ━━━") and "4/4" in epoch and "batches/s" in epoch and len(epoch) <= WIDTH
    assert values == "loss=0.25, score=0.5" and score == "score=0.5"
    assert testing.startswith("Testing 100% ━━━") and screen(terminal.getvalue())[1] == len(terminal.lines()) - 1


def test_leave_keeps_each_epoch(terminal):
    with terminal:
        make(RichProgress(leave=True), max_epochs=2).fit(Net(), BATCHES)
    assert [line.partition(" 100%")[0] for line in bars(terminal)] == ["Epoch 0", "loss=0.25", "Epoch 1", "loss=0.25"]


def test_an_evaluation_is_drawn_below_the_epoch(terminal, often):
    seen = []

    class Looks(Net):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            seen.append(bars(terminal))

    with terminal:
        make(RichProgress()).fit(Looks(), BATCHES, BATCHES)
    epoch, validating, values = seen[2]
    assert epoch.startswith("Epoch 0    100%") and validating.startswith("Validating  50%") and "2/4" in validating
    assert values == "loss=0.25"


@BOTH
def test_lines_go_above(terminal, often, kind):
    """Prints, warnings and logs of this process stand whole above the bars, which are drawn again at once."""
    seen = []

    def say(module, batch_idx):
        if batch_idx == 2:
            print("by print", "in one line")
            module.print("by the Trainer")
            print("to stderr", file=sys.stderr)
            print("two\nlines")
            logging.getLogger("test").warning("by a logger that has had stderr before")
            seen.extend(bars(terminal))

    handler = logging.StreamHandler(terminal)
    terminal.fileno = lambda: 2
    logging.getLogger("test").addHandler(handler)
    try:
        with terminal:
            make(kind()).fit(Net(say), BATCHES)
    finally:
        logging.getLogger("test").removeHandler(handler)
    said = ["by print in one line", "by the Trainer", "to stderr", "two", "lines"]
    said.append("by a logger that has had stderr before")
    assert seen[:6] == said and seen[6].startswith(TITLE[kind]) and " 50%" in seen[6]
    assert "loss=0.25" in seen[-1] and len(seen) == (8 if kind is RichProgress else 7)
    assert bars(terminal)[:6] == said and handler.stream is terminal


@BOTH
def test_a_line_of_another_process(terminal, often, kind):
    """It erases what is drawn, however many lines, and the next drawing stands below it."""
    other, seen = LinesAbove(terminal, str), []

    class Prints(Net):
        def validation_step(self, batch, batch_idx):
            print("of rank 1,", batch_idx, file=other)
            seen.append(bars(terminal))

    with terminal:
        make(kind()).fit(Prints(), BATCHES, BATCHES)
    said = [f"of rank 1, {index}" for index in range(4)]
    assert seen == [said[: index + 1] for index in range(4)]
    assert bars(terminal)[:4] == said and bars(terminal)[4].startswith(TITLE[kind])
    assert len(bars(terminal)) == (6 if kind is RichProgress else 5)


@BOTH
def test_a_question_is_written_at_once(terminal, often, kind):
    """What is flushed without the end of its line, as that of ``input``, is on the terminal, and stays."""
    seen = []

    def say(module, batch_idx):
        if batch_idx == 2:
            print("(Pdb) ", end="", flush=True)
            seen.extend(terminal.lines())

    with terminal:
        make(kind()).fit(Net(say), BATCHES)
    assert seen[-1] == "(Pdb)" and "(Pdb)" in bars(terminal)


def test_many_values_wrap(terminal):
    values = {f"a_rather_long_name_of_a_metric_{index}": float("nan") for index in range(5)}
    with terminal:
        make(RichProgress()).fit(Net(**values), BATCHES)
    lines = bars(terminal)
    assert max(map(len, lines)) <= WIDTH and " ".join(lines[1:]).count("=nan") == 5


def test_no_value_is_cut(terminal):
    """Beside a bar of tqdm stand those values that it has room for, and a bar of some length."""
    with terminal:
        make(ProgressBar()).fit(Net(**{f"metric_{index}": 0.125 for index in range(9)}), BATCHES)
    (line,) = bars(terminal)
    assert line.endswith(", loss=0.25, ...]") and "██████" in line.replace("#", "█") and len(line) <= WIDTH


def test_no_more_lines_than_the_terminal(terminal, monkeypatch, often):
    monkeypatch.setenv("LINES", "5")
    seen = []

    class Looks(Net):
        def validation_step(self, batch, batch_idx):
            seen.append(len(bars(terminal)))

    with terminal:
        make(RichProgress()).fit(Looks(**{f"{'long' * 15}_{index}": 1.0 for index in range(9)}), BATCHES, BATCHES)
    assert max(seen) == 4


@pytest.mark.parametrize(("variables", "colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour(terminal, monkeypatch, variables, colour):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with terminal:
        make(RichProgress()).fit(Net(), BATCHES)
    assert ("\x1b[38" in terminal.getvalue() or "\x1b[9" in terminal.getvalue()) == colour


@BOTH
def test_lines_on_a_dumb_terminal(terminal, monkeypatch, kind):
    monkeypatch.setenv("TERM", "dumb")
    with terminal:
        make(kind()).fit(Net(), BATCHES)
    assert "\x1b" not in terminal.getvalue() and "\r" not in terminal.getvalue()
    assert bars(terminal)[0].startswith("Epoch 0: 100% 4/4, ")


def test_lines_in_a_file(capsys):
    make(RichProgress(), max_epochs=2).fit(Net(), BATCHES, BATCHES)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("torchhal: ")]
    assert [line.partition(",")[0] for line in lines] == ["Epoch 0: 100% 4/4", "Epoch 1: 100% 4/4"]


@BOTH
def test_output_in_a_file_stays_there(terminal, tmp_path, monkeypatch, kind):
    with (tmp_path / "out").open("w") as file, terminal:
        monkeypatch.setattr(sys, "stdout", file)
        make(kind()).fit(Net(lambda module, index: print("hello", index)), BATCHES)
    assert (tmp_path / "out").read_text() == "".join(f"hello {index}\n" for index in range(4))
    assert "hello" not in terminal.getvalue()


@BOTH
def test_switched_off(terminal, kind):
    disabled = kind()
    disabled.disable()
    with terminal:
        for bar in (disabled, kind(refresh_rate=0)):
            make(bar).fit(Net(), BATCHES)
        assert terminal.getvalue() == ""
        disabled.enable()
        make(disabled).fit(Net(), BATCHES)
    assert bars(terminal)[0].startswith(TITLE[kind])


@BOTH
def test_streams_are_put_back(terminal, kind):
    def fails(module, batch_idx):
        raise RuntimeError("broken")

    bar = kind()
    with terminal, pytest.raises(RuntimeError, match="broken"):
        make(bar).fit(Net(fails), BATCHES)
    assert terminal.after == (terminal, terminal) and not bar.is_drawn


def test_it_travels_and_starts_no_thread(terminal):
    before = {thread.name for thread in threading.enumerate()}

    class Pickles(Callback):
        def on_train_batch_end(self, trainer, *args):
            copy = pickle.loads(pickle.dumps(trainer.progress_bar_callback))
            assert isinstance(copy, RichProgress) and not copy.is_drawn
            assert {thread.name for thread in threading.enumerate()} - before <= {"torchhal-signals"}

    with terminal:
        make(RichProgress(), Pickles()).fit(Net(), BATCHES)


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ModuleNotFoundError, match=r"RichProgress needs the package rich.*pip install torchhal\[rich\]"):
        RichProgress()


def test_plugins_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *args: None)
    for alias in ("rich_progress", "rich_summary"):
        available = registry.find("callback", alias).availability()
        assert not available and "'rich' is not installed" in available.reason


RANKS = """
import sys, time
import torch
from torch import nn
from torchhal import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        print(f"rank {self.global_rank} prints {batch_idx}")
        print(f"rank {self.global_rank} warns {batch_idx}", file=sys.stderr)
        self.log("loss", 0.25, prog_bar=True)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        print(f"rank {self.global_rank} validates {batch_idx}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.ones(60, 2), 2)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, val_check_interval=0.5, logger=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[sys.argv[2]], num_sanity_val_steps=0,
    )
    trainer.fit(Net(), data, data)
"""


@pytest.mark.parametrize(
    ("strategy", "bar"),
    [
        ("ddp", "rich_progress"),
        slow("ddp", "progress_bar"),
        slow("ddp_spawn", "rich_progress"),
        slow("ddp_fork", "rich_progress"),
    ],
)
def test_ranks_on_one_terminal(tmp_path, strategy, bar):
    """Rank 0 draws, and not one line of either rank is torn or lost."""
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, WIDTH, 0, 0))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    command = [sys.executable, str(script), strategy, bar]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=tmp_path)
    os.close(slave)
    written = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the last process has closed it
            break
        if not piece:
            break
        written += piece
    os.close(master)
    text = written.decode()
    assert process.wait(60) == 0, text
    lines = [line for line in screen(text)[0] if line and not line.startswith(("torchhal: ", "["))]
    expected = {
        f"rank {rank} {what} {index}" for rank in (0, 1) for what in ("prints", "warns", "validates")
        for index in range(15)
    }  # fmt: skip
    assert expected <= set(lines)
    drawn = [line for line in lines if line not in expected]
    assert drawn[0].startswith("Epoch 0") and "100%" in drawn[0] and "loss=0.25" in drawn[-1]
    assert len(drawn) == (2 if bar == "rich_progress" else 1)


@pytest.mark.parametrize(
    ("seconds", "speed"),
    [(0.01, "400 batches/s"), (1.0, "4 batches/s"), (3.0, "1.33 batches/s"), (16, "0.25 batches/s")],
)
def test_speed_and_times_of_a_line(monkeypatch, seconds, speed):
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file = io.StringIO()
    line = ProgressLines(desc="Epoch 0", total=12, leave=True, file=file)
    line.n, now[0] = 4, 10.0 + seconds
    line.refresh()
    left = f"00:{round(2 * seconds):02d}"
    assert file.getvalue() == f"Epoch 0:  33% 4/12, {speed}, {left} left\n"
