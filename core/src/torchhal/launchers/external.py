"""Use processes that exist already: torchrun's, a scheduler's, or a single process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torchhal.launchers.base import Launcher


class ExternalLauncher(Launcher):
    """A launcher that starts nothing: the function runs in this process, which another program started as a rank."""

    name: ClassVar[str] = "none"
    interactive: ClassVar[bool] = True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __repr__(self) -> str:
        return "ExternalLauncher()"
