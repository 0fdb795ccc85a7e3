"""Test the orderly stop of a run at a signal: its checkpoint, exit code and lines."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import pytest
import torch
from minimal_net import BATCHES, SCRIPT, Net, script
from quiet_trainer import make
from tiers import slow

from torchhal.trainer.callbacks import ModelCheckpoint


def test_stop_without_space_left(tmp_path):
    """The line of a stop tells that its state could not be saved."""
    done = script(
        tmp_path,
        """
        import errno

        def act(trainer):
            if trainer.global_step == 6:
                def full(descriptor):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync = full
                os.kill(os.getpid(), signal.SIGTERM)

        trainer(ModelCheckpoint(folder, every_n_train_steps=4), At("on_train_batch_end", act), max_epochs=9).fit(
            Net(), BATCHES
        )
        """,
    )
    assert done.returncode == 1 and "No space left" in done.stderr, done.stderr
    said = "fit stopped on SIGTERM at step 6, which could not be saved, so no scheduler is asked for another life"
    assert said in done.stderr, done.stderr
    assert re.search(r"The newest checkpoint is \S+step=4\.ckpt", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("hook", "save_last"),
    [("on_train_batch_end", False), ("on_train_batch_start", True), ("on_validation_start", False)],
)
def test_sigterm_leaves_a_loadable_checkpoint(tmp_path, hook, save_last):
    done = script(
        tmp_path,
        f"""
        def act(trainer):
            if trainer.global_step >= 4:
                os.kill(os.getpid(), signal.SIGTERM)
        trainer(At({hook!r}, act), ModelCheckpoint(folder, save_last={save_last}), max_epochs=99).fit(
            Net(), BATCHES, BATCHES)
        print("not reached")
        """,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout == "torn down fit\n" and "Traceback" not in done.stderr
    written = sorted(Path(tmp_path / "out").glob("*.ckpt"), key=os.path.getmtime)
    steps = torch.load(written[-1], weights_only=True)["global_step"]
    assert steps == {"on_train_batch_start": 5}.get(hook, 4)
    resumed = make(ModelCheckpoint(tmp_path / "out"), max_epochs=2)
    resumed.fit(Net(), BATCHES * 2, ckpt_path="last")
    assert resumed.global_step > steps or resumed.current_epoch == 2


def test_stop_at_saved_step(tmp_path):
    """A stop at a step that was just saved names that file."""
    done = script(
        tmp_path,
        """
        def act(trainer):
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
        trainer(At("on_train_batch_end", act), ModelCheckpoint(folder, every_n_train_steps=2), max_epochs=99).fit(
            Net(), BATCHES * 2)
        """,
    )
    assert done.returncode == 143, done.stderr
    (saved,) = (tmp_path / "out").glob("*.ckpt")
    assert f"saved {saved}, continue with ckpt_path='last'" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_sigterm_in_an_evaluation(tmp_path, fn):
    word = {"validate": "validation"}.get(fn, fn)
    done = script(
        tmp_path,
        f"""
        def act(trainer):
            print("batch", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        trainer(At("on_{word}_batch_end", act)).{fn}(Net(), BATCHES)
        print("not reached")
        """,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout == f"batch\ntorn down {fn}\n"


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "teardown", "setup", "on_fit_start"])
def test_sigterm_outside_the_loop_is_not_forgotten(tmp_path, hook):
    done = script(
        tmp_path,
        f"""
        trainer(At({hook!r}, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)), max_epochs=2).fit(Net(), BATCHES)
        print("not reached")
        """,
    )
    assert done.returncode == 143, (done.stdout, done.stderr)
    assert done.stdout == "torn down fit\n"


def test_ctrl_c_once_and_twice(tmp_path):
    once = script(
        tmp_path,
        """
        def act(trainer):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)
        t = trainer(At("on_train_batch_end", act), ModelCheckpoint(folder), max_epochs=99)
        try:
            t.fit(Net(), BATCHES)
        except KeyboardInterrupt:
            print("interrupted after", t.global_step, t.state.status)
        t.callbacks.clear()
        t.fit_loop.max_epochs = 1
        t.fit(Net(), BATCHES)
        print("and again", t.global_step)
        """,
    )
    assert once.returncode == 0, once.stderr
    assert once.stdout.splitlines() == [
        "torn down fit", "interrupted after 3 interrupted", "torn down fit", "and again 7",
    ]  # fmt: skip
    assert "press Ctrl-C again" in once.stderr
    assert [path.name for path in Path(tmp_path / "out").glob("*.ckpt")] == ["interrupted-epoch=0-step=3.ckpt"]
    twice = script(
        tmp_path,
        """
        class Slow(Net):
            def training_step(self, batch, batch_idx):
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(30)
        trainer(max_epochs=1).fit(Slow(), BATCHES)
        """,
        timeout=25,
    )
    assert twice.returncode in (130, -signal.SIGINT) and "KeyboardInterrupt" in twice.stderr
    assert twice.stdout == "torn down fit\n"


@pytest.mark.parametrize("strategy", ["auto", slow("ddp"), slow("ddp_spawn"), slow("ddp_fork"), slow("ddp_notebook")])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "file"])
def test_stop_prints_two_lines(tmp_path, terminal, strategy):
    """Neither behind a progress bar nor behind the ^C of the terminal, which reaches every process of the job; the code
    is that of the signal."""
    (tmp_path / "script.py").write_text(
        SCRIPT
        + textwrap.dedent(
            f"""
            class Interrupts(Callback):
                def on_train_batch_end(self, trainer, *args):
                    if trainer.global_step == 3 and trainer.is_global_zero:
                        os.killpg(os.getpgrp(), signal.SIGINT)
                    time.sleep(0.05)

            if __name__ == "__main__":
                trainer(Interrupts(), ModelCheckpoint(folder), max_epochs=999, enable_progress_bar=True,
                        strategy={strategy!r}, devices={1 if strategy == "auto" else 2}).fit(Net(), BATCHES)
            """
        )
    )
    reading, writing = os.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writing, (24, 100))
    command = [sys.executable, "script.py", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=writing, start_new_session=True)
    os.close(writing)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while piece := os.read(reading, 4096):
            shown += piece
    os.close(reading)
    assert process.wait(30) in (130, -signal.SIGINT)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+|\x1b\[A", shown.decode())]
    assert "torchhal: stopping after this step; press Ctrl-C again to stop at once" in lines, lines
    (stopped,) = [line for line in lines if "stopped on SIGINT" in line]
    assert stopped.startswith("torchhal: fit stopped on SIGINT at step ") and "ckpt_path='last'" in stopped
    assert not terminal or any("Epoch" in line for line in lines), "there was a bar"
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in lines), lines


@pytest.mark.usefixtures("accelerator")
def test_the_handlers_of_the_program_come_back():
    def handler(signum, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        for model in (Net(), type("Bad", (Net,), {"training_step": lambda self, batch, i: 1 / 0})()):
            try:
                make().fit(model, BATCHES)
            except ZeroDivisionError:
                pass
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("accelerator")
def test_a_fit_outside_the_main_thread():
    import threading

    found = []
    thread = threading.Thread(target=lambda: found.append(make().fit(Net(), BATCHES)))
    thread.start()
    thread.join(60)
    assert found == [None]
