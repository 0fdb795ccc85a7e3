"""The launcher contract: how the processes of a strategy come to be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar


class Launcher(ABC):
    """Starts the processes of one node and runs a function in each of them.

    A launcher knows ranks and processes, nothing of models or trainers. In every process it starts, it sets
    RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    name: ClassVar[str]
    """What the Plan prints."""

    interactive: ClassVar[bool] = False
    """Whether it works from a notebook or a REPL, where there is no script to run again."""

    returns_to_caller: ClassVar[bool] = True
    """False when the function runs in other processes than the caller's, so that changed state must be sent back:
    the function's result then travels by pickle from rank 0."""

    has_begun: bool = True
    """False after a launch that was stopped before rank 0 could say so, where that is another process."""

    @abstractmethod
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` in every process; the result of rank 0 (or of this process, where
        the caller itself is a rank).

        Raises:
            LaunchError: a process could not be started.
            RankFailedError: a process failed; all others are gone when this is raised.
        """
