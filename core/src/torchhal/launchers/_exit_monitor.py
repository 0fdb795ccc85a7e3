"""Report the death of the launching rank and its cause on stderr, from a small process that briefly outlives it.

The ranks that a script has started end at once when it dies (``_process.die_with_parent``), so none of
them can report it. Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import threading

_SCRIPT = r"""
trap "" HUP INT QUIT TERM USR1 USR2
read -r ended && exit
# Whoever started the rank takes its status away, often before it can be read here. The status is the last field.
read -r stat 2>/dev/null <"/proc/$2/stat"
status=${stat##* }
if [ "${status:-0}" -eq 0 ] 2>/dev/null; then
    sleep 1
    kill -0 "$2" 2>/dev/null && exit  # it lives: another program runs in its place
fi
if [ -z "$status" ]; then
    how="has died without a word: of SIGKILL, often the kernel's answer to too little memory, or of another signal"
elif [ "$((status & 127))" -ne 0 ]; then
    how="was ended by signal $((status & 127)) (SIG$(kill -l "$((status & 127))"))"
    [ "$((status & 127))" -eq 9 ] && how="$how, often the kernel's answer to too little memory"
    [ "$((status & 127))" -eq 6 ] &&
        how="$how, as C++ code gave up: with gloo often as ranks sent each other tensors of different sizes"
else
    how="left by os._exit($((status >> 8)))"
fi
echo "torchhal: rank $1 (process $2) $how; the ranks that it had started have ended with it." >&2
"""


class ExitMonitor:
    """A report of how this process, which is rank ``rank``, died, unless :meth:`stop` is called before.

    The monitor reads from a pipe that closes when this process ends in any way. Signals to the process group leave it
    alone. Without ``/bin/sh`` there is no report.
    """

    def __init__(self, rank: int) -> None:
        reader, self._writer = os.pipe()
        self._lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", str(rank), str(os.getpid())],
                stdin=reader,
                stdout=subprocess.DEVNULL,
            )
        except OSError:
            self.close_pipe()
        finally:
            os.close(reader)
        if hasattr(os, "register_at_fork"):  # a data-loading worker would keep the pipe open
            os.register_at_fork(after_in_child=self.close_pipe)

    def stop(self) -> None:
        """End the monitor: this process reports its end itself, or no report is needed. Idempotent."""
        with self._lock:
            if self._writer < 0:
                return
            try:
                os.write(self._writer, b"\n")
            except OSError:  # the monitor was killed
                pass
            self.close_pipe()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def close_pipe(self) -> None:
        """Close this process's end of the pipe without notifying the monitor."""
        if self._writer >= 0:
            descriptor, self._writer = self._writer, -1
            os.close(descriptor)
