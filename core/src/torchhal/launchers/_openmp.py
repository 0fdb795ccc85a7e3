"""Fork a process whose CPU threads have worked.

The OpenMP runtime keeps its threads between parallel regions. A fork has the runtime's record of them and not the
threads: the first parallel region in it waits for ever. Measured with torch 2.13: after any matmul, sort, convolution
or optimizer step on two threads in the parent, every fork that computed on more than one thread hung; with one
thread none did, and none after the runtime had released its threads before the fork.
"""

from __future__ import annotations

import ctypes


def pause_openmp_threads() -> bool:
    """End this thread's idle OpenMP threads; they are started again when needed. False: not possible or not confirmed.

    After False a fork must compute on one thread.
    """
    try:
        with open("/proc/self/maps") as maps:
            paths = {line[line.index("/") :].rstrip("\n") for line in maps if "/" in line}
    except OSError:
        return False
    names = ("libgomp", "libomp", "libiomp5")
    runtimes = [path for path in paths if path.rsplit("/", 1)[-1].startswith(names)]
    if not runtimes:
        return False
    try:
        # 2: hard, which frees the threads too; OpenMP 5.0's omp_pause_resource_all, since GCC 9.
        return all(ctypes.CDLL(path).omp_pause_resource_all(2) == 0 for path in runtimes)
    except (OSError, AttributeError):
        return False
