"""Compare a process of the fork server with one that a new interpreter starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from limits import scaled

from torchhal_conformance import _fork_server as fork_server
from torchhal_conformance._fork_server import ForkServer

pytestmark = [
    pytest.mark.cold_start,
    pytest.mark.skipif(sys.platform != "linux", reason="environment: a fork is adopted on Linux alone"),
]

FACTS = """
import json, os, resource, signal, sys, threading
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"),
    "spec": getattr(globals().get("__spec__"), "name", None), "main": main.__dict__ is globals(),
    "loader": type(globals().get("__loader__")).__name__.replace("type", "BuiltinImporter"),
    "folder": os.getcwd(), "environ": sorted(os.environ.items()),
    "proc environ": sorted(filter(None, open("/proc/self/environ").read().split("\\0"))),
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)),
    "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.mode, s.name, s.newlines, s.fileno(),
                 s.isatty()] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "threads": threading.active_count(),
    "warnings": sys.warnoptions, "umask": os.umask(0o22), "cpus": sorted(os.sched_getaffinity(0)),
}))
"""


@pytest.fixture(scope="module")
def server():
    """One that has imported no torch: what is compared is the same."""
    return ForkServer(["json", "threading", "tempfile", "random"])


@pytest.fixture
def prelude(tmp_path):
    """Path of a file that gives its fork the name ``server`` for the fork's own."""
    path = tmp_path / "prelude.py"
    path.write_text("def install(server):\n    import builtins\n    builtins.server = server\n")
    return str(path)


def finish(server, arguments, folder, **options):
    """Return the exit code and the output of a fork, in the same form as :func:`start`'s."""
    paths = [folder / name for name in ("in", "out", "err")]
    paths[0].write_text("first line\nsecond\n")
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    opened = [os.open(path, flag, 0o600) for path, flag in zip(paths, flags, strict=True)]
    try:
        pid = server.fork(arguments, dict(os.environ), adopt=True, descriptors=dict(enumerate(opened)), **options)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert pid is not None
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, paths[1].read_text(), paths[2].read_text()


def start(arguments, folder, **options):
    (folder / "in").write_text("first line\nsecond\n")
    with open(folder / "in") as stdin, open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        done = subprocess.run([sys.executable, *arguments], stdin=stdin, stdout=out, stderr=err, check=False,
                              env=dict(os.environ), **options)  # fmt: skip
    return done.returncode, (folder / "out").read_text(), (folder / "err").read_text()


@pytest.mark.parametrize("how", ["script", "code", "module", "folder"])
def test_fork_state_equals_interpreter_state(server, tmp_path, monkeypatch, how):
    (tmp_path / "facts.py").write_text(FACTS)
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "__main__.py").write_text(FACTS)
    words = {"script": ["facts.py"], "code": ["-c", FACTS], "module": ["-m", "facts"], "folder": ["archive"]}[how]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"more{os.pathsep}{tmp_path / 'again'}")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::UserWarning,error::FutureWarning")
    monkeypatch.setenv("OF_THIS_TEST", "äöü = 1")
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        real = start([*words, "--an", "argument"], tmp_path, start_new_session=True)
        forked = finish(server, [*words, "--an", "argument"], tmp_path, new_session=True)
    finally:
        signal.signal(signal.SIGUSR2, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert (forked[0], forked[2]) == (real[0], real[2]) == (0, "")
    found, expected = json.loads(forked[1]), json.loads(real[1])
    for name in ("environ", "proc environ"):
        assert [one for one in found[name] if one not in expected[name]] == []
        assert [one for one in expected[name] if one not in found[name]] == []
    assert {name: (found[name], expected[name]) for name in expected if found[name] != expected[name]} == {}
    assert found["parent"] == os.getpid()


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('said at the end')",
        "def f(): 1/0\nf()",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import os; os._exit(7)",
        "import sys; sys.excepthook = lambda *error: print(error[1]); raise ValueError('mine')",
        "import atexit; atexit.register(print, 'at exit'); print('before', end=' ')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()",
        "print(input(), input())",
        "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
        "this is no Python",
    ],
)
def test_fork_exit_code_is_interpreters(server, tmp_path, monkeypatch, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(code)
    for words in (["program.py"], ["-c", code], ["-m", "program"]):
        assert finish(server, words, tmp_path) == start(words, tmp_path)


def test_fork_has_given_descriptors_only(server, tmp_path):
    reader, writer = os.pipe()
    code = (
        f"import os; os.write({writer}, b'hello')\n"
        "print([n for n in range(99) if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    assert finish(server, ["-c", code], tmp_path)[1] == ""  # it isn't there, and the error is on stderr
    out = os.open(tmp_path / "out", os.O_WRONLY | os.O_TRUNC)
    pid = server.fork(["-c", code], dict(os.environ), adopt=True, descriptors={1: out, 2: 2, writer: writer})
    os.close(writer)
    os.close(out)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(reader, 10) == b"hello" and os.read(reader, 10) == b""
    assert json.loads((tmp_path / "out").read_text()) == [0, 1, 2, writer]
    os.close(reader)


def test_descriptors_spare_own_server_socket(server, prelude):
    """Whatever numbers are passed, low or high: the next fork of the fork works."""
    code = (
        "import os\npid = server.fork(['-c', 'print(3)'], dict(os.environ), adopt=True)\n"
        "raise SystemExit(os.waitpid(pid, 0)[1])"
    )
    for numbers in (range(3, 30), [200, 500]):
        passed = dict.fromkeys([1, *numbers], 1)
        pid = server.fork(["-c", code], dict(os.environ), adopt=True, descriptors=passed, prelude=prelude)
        assert os.waitpid(pid, 0)[1] == 0


def test_concurrent_forks_return_own_processes(server):
    def code_of(number):
        pid = server.fork(["-c", f"raise SystemExit({number})"], dict(os.environ), adopt=True)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    codes = [number % 7 for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(code_of, codes)) == codes


def test_interrupted_request_keeps_answers_matched(server, monkeypatch):
    receive = fork_server.receive

    def interrupted(end):
        monkeypatch.setattr(fork_server, "receive", receive)
        raise KeyboardInterrupt

    ended = ForkServer(["json"])
    assert ended.fork(["-c", ""], dict(os.environ)) is not None
    monkeypatch.setattr(fork_server, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ended.fork(["-c", "raise SystemExit(1)"], dict(os.environ))
    pid = ended.fork(["-c", "raise SystemExit(2)"], dict(os.environ), adopt=True)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


def test_options_reach_program_without_children(server, tmp_path):
    code = (
        "import sys, os; print(sys.orig_argv[1:3], sys.warnoptions, sys.stdout.write_through)\n"
        "print('PYTHONWARNINGS' in os.environ)"
    )
    forked = finish(server, ["-c", code], tmp_path, options=["-u", "-Wignore"])
    assert forked == start(["-u", "-Wignore", "-c", code], tmp_path)


def test_fork_refuses_hidden_module(server, tmp_path):
    (tmp_path / "json.py").write_text("")
    (tmp_path / "script.py").write_text("")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert server.fork([str(tmp_path / "script.py")], dict(os.environ)) is None
    assert server.fork(["-c", ""], environ) is None
    assert server.fork(["-c", ""], dict(os.environ), folder=str(tmp_path)) is None


def test_forks_draw_different_random_numbers(server, tmp_path):
    code = "import random, tempfile; print(random.random(), next(tempfile._get_candidate_names()))"
    assert len({finish(server, ["-c", code], tmp_path)[1] for _ in range(3)}) == 3


def test_fork_starts_forks_from_own_server(server, prelude, tmp_path):
    """Both are children of those that asked, and the server is gone with the process that it belongs to."""
    code = (
        "import os, sys\n"
        "before = 'torch' in sys.modules\n"
        "import decimal\n"
        "again = 'import os, sys; print(os.getppid(), \"decimal\" in sys.modules, flush=True)'\n"
        "pid = server.fork(['-c', again], dict(os.environ), adopt=True)\n"
        "assert os.waitpid(pid, 0) == (pid, 0)\n"
        "print(os.getpid(), server._socket.fileno(), *os.listdir(f'/proc/{os.getpid()}/task'))\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read())"
    )
    code_of, said, errors = finish(server, ["-c", code], tmp_path, prelude=prelude)
    assert (code_of, errors) == (0, "")
    first, second, children = said.splitlines()
    assert first.split() == [second.split()[0], "False"]
    assert len(children.split()) == 1
    deadline = time.monotonic() + scaled(60)
    while Path(f"/proc/{children.split()[0]}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_server_ends_with_client(tmp_path):
    code = (
        "from torchhal_conformance._fork_server import ForkServer; import os, time\n"
        "server = ForkServer(['json']); server.fork(['-c', ''], dict(os.environ))\n"
        "print(server._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        pid = int(client.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        client.kill()
    deadline = time.monotonic() + scaled(60)
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_server_reports_failed_import(capfd):
    server = ForkServer(["no_such_module"])
    with pytest.raises(RuntimeError, match="from one that imports no_such_module"):
        server.fork(["-c", ""], dict(os.environ))
    assert "No module named 'no_such_module'" in capfd.readouterr().err
