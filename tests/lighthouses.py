"""A real lighthouse, in a process of its own on a free port."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

START = """
import sys, time
from torchft.coordination import LighthouseServer
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=int(sys.argv[1]),
                              join_timeout_ms=int(sys.argv[2]), heartbeat_timeout_ms=int(sys.argv[3]))
print(lighthouse.address().rpartition(":")[2].rstrip("/"), flush=True)
while True:
    time.sleep(60)
"""


@contextmanager
def lighthouse(*, min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000):
    """Its address. The system chooses the port, in the process that listens on it."""
    command = [sys.executable, "-c", START, str(min_replicas), str(join_timeout_ms), str(heartbeat_timeout_ms)]
    quiet = {**os.environ, "RUST_LOG": "error"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet)
    try:
        port = process.stdout.readline().strip()
        assert port, "the lighthouse did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
