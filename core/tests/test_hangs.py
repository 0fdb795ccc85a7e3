"""Ranks that wait for each other in vain: the error, what each rank writes, and ``torchhal doctor`` on it.

The trainings are scripts/hangs.py's, which run once for all tests of this file.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from torchhal.cli import main
from torchhal.distributed import (
    _flight_recorder as flight_recorder,
)
from torchhal.distributed import (
    _hang_dump as hang_dump,
)
from torchhal.distributed import (
    _process_inspection as process_inspection,
)
from torchhal.distributed._hang_dump import HangDump
from torchhal.distributed._process_inspection import Presence

pytestmark = pytest.mark.timeout(400)  # the trainings run in the first test

SCRIPT = Path(__file__).parent / "scripts" / "hangs.py"
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at other processes in /proc")


@pytest.fixture(scope="module")
def hangs(tmp_path_factory):
    """The folder of each training, by name."""
    folder = tmp_path_factory.mktemp("hangs")
    names = [*EXPECTED, "read-only"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *names], capture_output=True, text=True, timeout=360, check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert sorted(path.parent.name for path in folder.glob("*/error.txt")) == sorted(names), done.stderr[-4000:]
    return {name: folder / name for name in names}


def doctor(capsys, *arguments):
    """The exit code and what was printed."""
    capsys.readouterr()
    code = main(["doctor", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def line_of(text):
    """Where ``text`` stands in the script, as the doctor writes it."""
    lines = SCRIPT.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return f"{SCRIPT}:{number}"


FIT, BACKWARD = "trainer.fit(Net(name), data)", "(by _engine_run_backward < backward"

# name: (what the error says, what the doctor says, each in one line; @... is the line of the script with that text)
EXPECTED = {
    "log": (
        [": every rank waited for another collective"],
        [
            "group 0 (ranks 0, 1, gloo): the ranks are in different collectives, all number 21",
            "  rank 0: all_gather number 21 of Long [1], at @self.log(@ in misbehave (by all_gather_object < agree",
            f"  rank 1: all_reduce number 21 of Float [5], at @{FIT}@ in train {BACKWARD}",
            "step 2, in reduce(op='mean')",
        ],
    ),
    "one more": (
        [": every rank waited for another collective"],
        [
            "the ranks are in different collectives, all number 25",
            "  rank 0: all_gather number 25 of Long [1], at @trainer.fit(@ in train (by all_gather_object < combine <",
            f"  rank 1: all_reduce number 25 of Float [5], at @trainer.fit(@ in train {BACKWARD}",
        ],
    ),
    "by hand": (
        ["all_reduce number 12 failed on rank 1: rank 0 has ended its work."],
        [
            "group 0 (ranks 0, 1, gloo): rank 1 waits in all_reduce number 12 for rank 0",
            "  rank 0: it wrote nothing: it has ended its work",
            f"  rank 1: all_reduce number 12 of Float [5], at @strategy.backward(@ in loop {BACKWARD}",
        ],
    ),
    "sleep": (
        ["all_reduce number 21 timed out on rank 0: rank 1 did not take part.", "\nrank 1: at @time.sleep(@ in fall_a"],
        [
            "group 0 (ranks 0, 1, gloo): rank 0 waits in all_reduce number 21 for rank 1",
            f"  rank 0: all_reduce number 21 of Float [5], at @{FIT}@ in train {BACKWARD}",
            "  rank 1: came to number 20 only, now at @time.sleep(600)@ in fall_asleep",
            "    wrote because all_reduce number 21 timed out on rank 0",
        ],
    ),
    "stop": (
        ["rank 1 is gone without a word", "is stopped (by SIGSTOP, or Ctrl-Z)"],
        ["rank 0 waits in all_reduce number 21 for rank 1", "  rank 1: it wrote nothing: its process "],
    ),
    "hold": (
        ["rank 1 is gone without a word", "is there, but in code that holds Python's lock"],
        ["rank 0 waits in all_reduce number 21 for rank 1", " in fullmatch", f'    File "{SCRIPT}", line '],
    ),
    "mismatch": (
        [": every rank waited for another collective"],
        [
            "group 0 (ranks 0, 1, gloo): the ranks are in different collectives, all number 21",
            "  rank 0: all_reduce number 21 of Float [3], at @dist.all_reduce(@ in misbehave\n",
            "  rank 1: broadcast number 21 of Float [3], at @dist.broadcast(@ in misbehave\n",
        ],
    ),
    "barrier": (
        ["barrier 'evaluation of rank 0': rank 1 did not come within 6.", "\nrank 1: at @trainer.fit(@ in train"],
        [
            "rank 0 waits in barrier 'evaluation of rank 0' for rank 1",
            "rank 1 waits in all_reduce number 21 for rank 0",
            "step 2, in barrier 'evaluation of rank 0'\n    @strategy.barrier(@ in misbehave",
        ],
    ),
    "abort": (
        ["rank 1 was ended by signal 6 (SIGABRT) (C++ code gave up: with gloo often as ranks sent each other tensors"],
        [
            "rank 0 waits in all_reduce number 21 for rank 1",
            "  rank 1: it wrote nothing: killed or stopped, or on another machine",
            "    wrote because rank 1 was ended by signal 6 (SIGABRT)",
        ],
    ),
}  # fmt: skip


def filled(text):
    return re.sub("@(.+?)@", lambda match: line_of(match[1]), text)


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("name", EXPECTED)
def test_who_waits_for_whom(hangs, name, capsys):
    of_error, of_doctor = EXPECTED[name]
    error = (hangs[name] / "error.txt").read_text()
    code, said = doctor(capsys, hangs[name])
    assert code == 0
    missing = [text for text in map(filled, of_error) if text not in error]
    assert not missing, error
    missing = [text for text in map(filled, of_doctor) if text not in said]
    assert not missing, said
    # the command in the error prints the same
    if name != "abort":  # whose error is the launching process's
        (command,) = set(re.findall("torchhal doctor (.+)$", error, re.MULTILINE))
        assert doctor(capsys, command.strip("'")) == (0, said)


def test_dump_with_unwritable_run_folder(hangs, capsys):
    """A run folder that can't be written to hides no error."""
    error = (hangs["read-only"] / "error.txt").read_text()
    assert "CollectiveTimeoutError: all_reduce number 21 timed out on rank 0: rank 1 did not take part" in error
    (command,) = set(re.findall("torchhal doctor (.+)$", error, re.MULTILINE))
    assert Path(command).parent.name == "temporary"
    code, said = doctor(capsys, command)
    assert code == 0
    assert "rank 1: came to number 20 only, now at " in said


def test_hanging_disk_does_not_block_dump(tmp_path, monkeypatch):
    """A disk that no longer responds does not block the dump."""
    dump = HangDump(0, 2, str)
    dump.run_folder = str(tmp_path / "run")
    dump._name = "hang-1"
    there = tmp_path / "run" / "hang-1"
    there.mkdir(parents=True)
    os.mkfifo(there / "rank-0.json.by-0")  # to open it for writing takes until somebody reads
    monkeypatch.setattr(hang_dump, "WRITING", 0.3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dump.write("test", 7)
    assert dump.folder == str(tmp_path / "hang-1")
    dump.write_for(0, "something")  # what a rank has written itself is kept
    assert json.loads((tmp_path / "hang-1" / "rank-0.json").read_text())["step"] == 7
    assert "torchhal doctor" in dump.hint({})
    with open(there / "rank-0.json.by-0"):  # let the thread end
        pass


def test_hanging_recorder_does_not_block_dump(tmp_path, monkeypatch):
    """Those of other backends wait for locks that may be what hangs; a second writer knows where the first has been."""
    dump, asked = HangDump(0, 2, str), threading.Event()
    dump.run_folder, dump._name = str(tmp_path), "hang-1"
    over = threading.Event()

    def stuck():
        asked.set()
        over.wait(60)
        return []

    monkeypatch.setattr(hang_dump.flight_recorder, "collectives", stuck)
    monkeypatch.setattr(hang_dump, "WRITING", 0.5)
    watch = threading.Thread(target=dump.write, args=("test", 7))
    watch.start()
    assert asked.wait(10)
    dump.write("test", 7)
    assert dump.folder in dump.hint({})
    content = json.loads((tmp_path / "hang-1" / "rank-0.json").read_text())
    assert content["collectives"] == [] and content["threads"]
    over.set()
    watch.join()


# -- what the doctor reads -----------------------------------------------------------------------------------


@pytest.fixture
def copy(hangs, tmp_path):
    """A copy of the hang of "sleep", to be changed."""
    (folder,) = hangs["sleep"].glob("hang-*")
    return Path(shutil.copytree(folder, tmp_path / "run" / folder.name))


def change(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_json_has_what_the_ranks_wrote(copy, capsys):
    code, said = doctor(capsys, copy.parent, "--json")
    found = json.loads(said)
    assert (code, found["schema"], found["world_size"], found["absent"]) == (0, 1, 2, {})
    assert [(f["kind"], f["group"], f["number"]) for f in found["findings"]] == [("missing", "0", 21)]
    assert found["ranks"][0]["groups"] == {"0": [0, 1]}
    assert "_engine_run_backward" in found["ranks"][0]["threads"][0]["stack"][0]
    assert {"MainThread", "torchhal-watch"} <= {thread["name"] for thread in found["ranks"][1]["threads"]}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "rank 1: it wrote nothing: killed or stopped, or on another machine"),
        (lambda path: path.write_text(path.read_text()[:1000]), "rank 1: its file "),
        (lambda path: path.write_bytes(b"\xff\xfe"), "can't be read: 'utf-8' codec"),
        (lambda path: path.write_text("[]"), "can't be read: it isn't what a rank writes"),
        (lambda path: change(path, lambda dump: dump.update(schema=2)), "by a newer torchhal (schema 2, known is 1)"),
        (lambda path: change(path, lambda dump: dump.update(rank=0)), "can't be read: it is rank 0's"),
        (lambda path: change(path, lambda dump: dump.pop("threads")), "it has no 'threads' of type list"),
        (
            lambda path: change(path, lambda dump: dump["collectives"][3].pop("number")),
            "a collective of it has no 'number' of type int",
        ),
        (
            lambda path: change(path, lambda dump: dump["threads"].append(1)),
            "a thread of it has no 'main' of type bool",
        ),
    ],
    ids=range(9),
)
def test_damaged_report_is_named(copy, capsys, damage, said):
    """The doctor names a report that it can't read and compares the rest."""
    damage(copy / "rank-1.json")
    code, text = doctor(capsys, copy)
    assert code == 0
    assert said in text
    assert "group 0 (ranks 0, 1, gloo): rank 0 waits in all_reduce number 21 for rank 1" in text


def test_other_sizes_of_the_same_collective_are_found(copy, capsys):
    def larger(dump):
        (call,) = (call for call in dump["collectives"] if call["number"] == 20)
        call["sizes"] = [[6]]

    change(copy / "rank-1.json", larger)
    _, text = doctor(capsys, copy)
    assert "group 0 (ranks 0, 1, gloo): the ranks are in different collectives, all number 20" in text
    assert "  rank 0: all_reduce number 20 of Float [5]" in text
    assert "  rank 1: all_reduce number 20 of Float [6]" in text


def test_complete_groups_are_not_accused(copy, capsys):
    """Ranks of a group that are all there are not accused."""
    for rank in (0, 1):
        change(copy / f"rank-{rank}.json", lambda dump: dump.update(collectives=dump["collectives"][:4], doing=""))
    _, text = doctor(capsys, copy)
    assert "group 0 (ranks 0, 1, gloo): all ranks have entered the same 4 collectives, the last: " in text
    for rank in (0, 1):
        change(copy / f"rank-{rank}.json", lambda dump: dump.update(collectives=[]))
    _, text = doctor(capsys, copy)
    assert "no rank recorded a collective: there was none yet, TORCH_FR_BUFFER_SIZE is 0" in text


def test_the_newest_hang_of_a_run_is_shown(copy, capsys):
    shutil.copytree(copy, copy.parent / "hang-20200101-000000-abcdef")
    _, text = doctor(capsys, copy.parent.parent)
    assert text.startswith(f"{copy}: 2 ranks\n")
    assert text.endswith(f"older: {copy.parent / 'hang-20200101-000000-abcdef'}\n")


def test_folders_without_a_hang(tmp_path, capsys):
    (tmp_path / "hang-empty").mkdir()
    code, text = doctor(capsys, tmp_path)
    assert code == 2
    assert text.startswith("error: no hang-*/rank-*.json was found in or below ")
    code, text = doctor(capsys, tmp_path / "nowhere")
    assert code == 2
    assert "'RUN_DIR' must be the folder of a run (got " in text


# -- what torch and the system tell ---------------------------------------------------------------------------


def test_torch_without_flight_recorder(monkeypatch):
    """A torch without a flight recorder is no error."""
    module = torch._C._distributed_c10d
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        monkeypatch.delattr(module, name, raising=False)
    assert (flight_recorder.collectives(), flight_recorder.last()) == ([], "")
    monkeypatch.setattr(module, "_dump_fr_trace", lambda: b"something else", raising=False)
    assert flight_recorder.collectives() == []


@pytest.mark.cold_start
def test_flight_recorder_reads_own_collectives():
    """torch imports it, before the first optimizer step: seconds on every rank, with others waiting to end them all."""
    code = """if True:
        import contextlib, sys, torch, torch.distributed as dist
        from torchhal.distributed import _flight_recorder as flight_recorder
        for life in range(3):  # the last in a group that somebody else has made
            with flight_recorder.recording() if life < 2 else contextlib.nullcontext():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                for _ in range(5 - 2 * life):
                    dist.all_reduce(torch.ones(3))
                print([call["number"] for call in flight_recorder.collectives()])
                dist.destroy_process_group()
        (call,) = flight_recorder.collectives()
        print(call["name"], call["sizes"], len(call["stack"]) > 0, "torch._inductor" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    lives = "[1, 2, 3, 4, 5]\n[1, 2, 3]\n[1]\n"
    assert done.stdout == f"{lives}all_reduce [[3]] True False\n", done.stderr


@pytest.mark.parametrize("given", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_flight_recorder_settings_are_kept(monkeypatch, given):
    """Variables of the flight recorder that the user has set are left alone."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(given, "0")
    before = dict(os.environ)
    with flight_recorder.recording():
        assert dict(os.environ) == before
    assert dict(os.environ) == before


@needs_linux
def test_reused_pid_is_recognised():
    """A process is not taken for another one of its number."""
    code = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            there = {
                **process_inspection.process_record(),
                "pid": child.pid,
                "started": process_inspection._stat(child.pid)[1],
                "stacks": None,
            }
            said = f"its process {child.pid} is there, but in code that holds Python's lock"
            assert process_inspection.inspect_process(there) == (Presence.THERE, said, [])
            gone = (Presence.GONE, f"its process {child.pid} is gone", ())
            assert process_inspection.inspect_process({**there, "started": "1"}) == gone
            elsewhere = (Presence.ELSEWHERE, f"its process {child.pid} on n7 answers nothing", ())
            assert process_inspection.inspect_process({**there, "host": "n7 pid:[1]"}) == elsewhere
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)  # until it is
            presence, said, _ = process_inspection.inspect_process(there)
            assert presence is Presence.THERE and "is stopped" in said
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # until nobody has asked how it ended
            assert process_inspection.inspect_process(there) == (
                Presence.GONE,
                f"its process {child.pid} has ended",
                (),
            )
        finally:
            child.kill()
    assert process_inspection.inspect_process(there) == gone
