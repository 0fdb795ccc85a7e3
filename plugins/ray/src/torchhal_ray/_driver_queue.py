"""Pass messages from rank 0 to the driver while the call runs, without importing torch or ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

post: Callable[[Any], None] | None = None
"""In a worker whose driver listens. Returns when the driver has done with the message."""


class MessageQueue:
    """An actor between a worker that is busy and a driver that looks now and then."""

    def __init__(self) -> None:
        self._letters: asyncio.Queue[Any] = asyncio.Queue(1)
        self._done: asyncio.Queue[None] = asyncio.Queue(1)

    async def post(self, letter: Any) -> None:
        """Put a letter, on rank 0; return when the driver has called :meth:`done`."""
        await self._letters.put(letter)
        await self._done.get()

    async def next(self) -> Any:
        """Return the next letter, on the driver, when there is one."""
        return await self._letters.get()

    async def done(self) -> None:
        await self._done.put(None)


class MessageSender:
    """The end of the queue that rank 0 calls; it is sent there by pickle."""

    def __init__(self, box: Any) -> None:
        self._box = box

    def __call__(self, letter: Any) -> None:
        import ray

        ray.get(self._box.post.remote(letter))


class MessageReader:
    """The driver's end: ``read`` is called with each letter; without a ``read`` there is no mailbox."""

    def __init__(self, ray: Any, read: Callable[[Any], None] | None) -> None:
        self._ray, self._read = ray, read
        self._box: Any = None
        self._next: Any = None
        if read is not None:
            self._box = ray.remote(MessageQueue).options(num_cpus=0).remote()
            self._next = self._box.next.remote()

    @property
    def post(self) -> MessageSender | None:
        return None if self._box is None else MessageSender(self._box)

    def waiting(self) -> list[Any]:
        """Return what to wait for, beside other things; give it to :meth:`take` when it is there."""
        return [] if self._next is None else [self._next]

    def take(self, answer: Any) -> None:
        assert self._read is not None
        self._read(self._ray.get(answer))
        self._box.done.remote()
        self._next = self._box.next.remote()

    def close(self) -> None:
        if self._box is not None:
            self._ray.kill(self._box)
