"""The outbox: what is appended stays, is read whole, and is known as sent or not, in any process."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from torchhal_loggers._outbox import Outbox


def numbers(lines):
    return [line.record["n"] for line in lines if line.record is not None]


def test_nothing_is_made_before_the_first_record(tmp_path):
    outbox = Outbox(tmp_path / "a" / "b")
    assert outbox.is_empty and outbox.unsent(10) == [] and outbox.count_unsent() == 0
    assert not (tmp_path / "a").exists()


def test_records_are_read_in_order_and_in_parts(tmp_path):
    outbox = Outbox(tmp_path)
    for n in range(5):
        outbox.append({"n": n, "text": "größe\nsecond line"})
    lines = outbox.unsent(2)
    assert numbers(lines) == [0, 1] and lines[0].record["text"] == "größe\nsecond line"
    outbox.mark_sent(lines[0].end)
    assert outbox.count_unsent() == 4
    outbox.mark_sent(lines[1].end)
    assert outbox.count_unsent() == 3 and not outbox.is_empty
    lines = Outbox(tmp_path).unsent(10)  # another process
    assert numbers(lines) == [2, 3, 4]
    outbox.mark_sent(lines[-1].end)
    assert outbox.is_empty and outbox.count_unsent() == 0


def test_what_was_sent_stays_sent(tmp_path):
    outbox = Outbox(tmp_path)
    for n in range(3):
        outbox.append({"n": n})
    first, second, _ = outbox.unsent(3)
    outbox.mark_sent(second.end)
    outbox.mark_sent(first.end)  # a process that was slower
    assert numbers(outbox.unsent(3)) == [2]


def test_the_end_of_a_call(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.append({"n": 0, "text": "x" * 1000})
    assert not outbox.ends_with_status()
    outbox.append({"status": "success", "time": 1.0})
    assert outbox.ends_with_status() and outbox.count_unsent() == 1
    outbox.append({"n": 1})
    assert not outbox.ends_with_status()


def test_numbers_that_are_not_finite_come_back(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.append({"n": [float("inf"), float("-inf"), float("nan")]})
    (high, low, nan) = outbox.unsent(1)[0].record["n"]
    assert high == float("inf") and low == float("-inf") and nan != nan


def test_a_record_longer_than_what_is_read_at_once(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.append({"n": 0, "text": "x" * 3_000_000})
    outbox.append({"n": 1})
    lines = outbox.unsent(10)
    while lines[-1].end < outbox.size:
        lines += outbox.unsent(10, lines[-1].end)
    assert numbers(lines) == [0, 1] and len(lines[0].record["text"]) == 3_000_000


@pytest.mark.parametrize("torn", [b'{"n": 1, "x', b"\0\0\0", b'{"n": 1}'])
def test_a_line_that_a_kill_cut_short_costs_no_other(tmp_path, torn):
    outbox = Outbox(tmp_path)
    outbox.append({"n": 0})
    outbox.close()
    with open(outbox.records_path, "ab") as file:
        file.write(torn)
    assert numbers(outbox.unsent(10)) == [0], "it may still be written on"
    again = Outbox(tmp_path)
    again.append({"n": 2})
    again.append({"n": 3})
    assert [n for n in numbers(again.unsent(10)) if n != 1] == [0, 2, 3]
    assert again.unsent(10)[-1].end == again.size, "nothing is left to be tried again"


@pytest.mark.parametrize("noted", [b"", b"nonsense", b"-5", b"99999999", b"\xff\xff"])
def test_a_note_that_makes_no_sense_sends_everything_again(tmp_path, noted):
    outbox = Outbox(tmp_path)
    outbox.append({"n": 0})
    (tmp_path / "sent").write_bytes(noted)
    assert numbers(outbox.unsent(10)) == [0]


def test_a_full_disk_costs_what_does_not_fit(tmp_path):
    """A limit of the size of files stands for the disk: in a process of its own, as it can't be raised again."""
    script = textwrap.dedent(f"""
        import pathlib, resource, signal
        from torchhal_loggers._outbox import Outbox
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        outbox = Outbox(pathlib.Path({str(tmp_path)!r}))
        outbox.append({{"n": 0}})
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
        try:
            outbox.append({{"n": 1, "x": "y" * 100}})
        except OSError as error:
            print("refused", error.errno)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        outbox.append({{"n": 2}})
    """)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert "refused" in done.stdout, done.stderr
    assert numbers(Outbox(tmp_path).unsent(10)) == [0, 2]


def test_what_append_returned_from_survives_a_kill(tmp_path):
    script = textwrap.dedent(f"""
        import os, pathlib, signal
        from torchhal_loggers._outbox import Outbox
        outbox = Outbox(pathlib.Path({str(tmp_path)!r}))
        for n in range(1000):
            outbox.append({{"n": n}})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == -signal.SIGKILL
    assert numbers(Outbox(tmp_path).unsent(2000)) == list(range(1000))


def test_processes_append_side_by_side(tmp_path):
    script = textwrap.dedent(f"""
        import pathlib, sys
        from torchhal_loggers._outbox import Outbox
        outbox = Outbox(pathlib.Path({str(tmp_path)!r}))
        for n in range(500):
            outbox.append({{"n": n, "of": sys.argv[1], "x": "y" * n}})
    """)
    processes = [subprocess.Popen([sys.executable, "-c", script, name]) for name in "ab"]
    assert [process.wait(60) for process in processes] == [0, 0]
    lines = Outbox(tmp_path).unsent(5000)
    for name in "ab":
        assert numbers(line for line in lines if line.record["of"] == name) == list(range(500))


def test_values_that_json_does_not_know_become_text(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.append({"n": tmp_path, "where": object})
    assert outbox.unsent(1)[0].record == {"n": str(tmp_path), "where": str(object)}


def test_a_read_only_folder_is_an_error(tmp_path):
    if os.geteuid() == 0:
        target = tmp_path / "file"
        target.write_text("")
        outbox = Outbox(target / "below")
    else:
        tmp_path.chmod(0o500)
        outbox = Outbox(tmp_path / "below")
    with pytest.raises(OSError, match=r"below|file"):
        outbox.append({"n": 0})


def test_files_are_small_json_lines(tmp_path):
    outbox = Outbox(tmp_path)
    outbox.append({"metrics": {"loss": 0.5}, "step": 1})
    outbox.sync()
    assert json.loads(outbox.records_path.read_text()) == {"metrics": {"loss": 0.5}, "step": 1}
