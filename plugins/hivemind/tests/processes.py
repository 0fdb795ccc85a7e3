"""Which processes hivemind has started, and whether they are gone."""

import subprocess
import time


def table():
    """pid -> (parent, session, command) of every process."""
    # -ww, or a COLUMNS in the environment cuts commands short
    command = ["ps", "-e", "-ww", "-o", "pid=,ppid=,sess=,args="]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = (line.split(None, 3) for line in found.stdout.splitlines())
    return {int(pid): (int(parent), int(session), command) for pid, parent, session, command in rows}


def descendants(pid):
    """What hivemind has forked in this process, and its daemon: each is in a session that one of the forked leads."""
    processes = table()
    children = {child for child, (parent, _, _) in processes.items() if parent == pid}
    return {child for child, (_, session, _) in processes.items() if session in children}


def alive(pids):
    """pid -> command of those that still run."""
    return {pid: command for pid, (_, _, command) in table().items() if pid in pids and "<defunct>" not in command}


def assert_gone(pids, within=20.0):
    deadline = time.monotonic() + within
    while left := alive(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
