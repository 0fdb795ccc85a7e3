"""Send requests to the lighthouse in a thread."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any


class Worker(concurrent.futures.Executor):
    """One thread, which is not joined: a request to the lighthouse can't be cancelled.

    A ThreadPoolExecutor would keep the process from ending until the answer, or the timeout, has come.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="torchhal-quorum", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def task() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._idle.clear()
        self._tasks.put(task)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread, unless it is in a task: then it ends with that, or with the process."""
        self._tasks.put(None)
        if self._idle.is_set():
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task
            if self._tasks.empty():
                self._idle.set()
