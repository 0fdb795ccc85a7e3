"""Start two processes of a command that learn their ranks from this one, and from no variable.

``runtime_launcher.py COMMAND...``; what they read is a file with this process's number in its name.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile

PATH = os.path.join(tempfile.gettempdir(), f"torchhal-test-runtime-{os.getpid()}")
GATE = "import os, sys; sys.stdin.read(); os.execvp(sys.argv[1], sys.argv[1:])"
"""Waits until its standard input is closed, as its number has to be in the file before it reads that."""


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", GATE, *sys.argv[1:]]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    try:
        ranks = {str(one.pid): {"rank": rank, "size": 2, "port": port} for rank, one in enumerate(started)}
        with open(PATH, "w") as file:
            json.dump(ranks, file)
        for one in started:
            assert one.stdin is not None
            one.stdin.close()
        return max(abs(one.wait()) for one in started)
    finally:
        os.remove(PATH)


if __name__ == "__main__":
    sys.exit(main())
