"""Define the launcher contract: how the processes of a strategy are started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torchhal.errors import LaunchError


class Launcher(ABC):
    """A way to start the processes of one node and to run a function in each of them.

    A launcher handles ranks and processes and doesn't depend on models or trainers. In every process it starts, it sets
    RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    name: ClassVar[str]
    """Name by which the Plan prints it."""

    interactive: ClassVar[bool] = False
    """True if it works from a notebook or a REPL, where there is no script to run again."""

    returns_to_caller: ClassVar[bool] = True
    """False when the function runs in other processes than the caller's, so that changed state must be sent back.

    The function's result is then sent by pickle from rank 0.
    """

    has_begun: bool = True
    """False after a launch that was stopped before rank 0, in another process, could report that it runs."""

    @abstractmethod
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` in every process and return the result of rank 0.

        Called in the process that calls fit; where that process is itself a rank, its own result is returned.

        Args:
            function: what every rank runs.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Raises:
            LaunchError: a process could not be started.
            RankFailedError: a process failed; all others are gone when this is raised.
        """

    def entered(self) -> AbstractContextManager[None]:
        """Return a context in which the calling process is a rank, as inside of :meth:`launch`; the others are started.

        For a program that is no function. Its errors are to leave the context as they would leave the function.

        Raises:
            LaunchError: the ranks are other processes than the calling one.

        .. versionadded:: 0.2
        """
        raise LaunchError(
            f"launcher {self.name!r} starts processes that run a function, and a script goes on in this one: put what "
            "is to run on every rank into a function, and call run.launch(function)"
        )
