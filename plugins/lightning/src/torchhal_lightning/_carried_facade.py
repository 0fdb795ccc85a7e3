"""Take a Trainer with Lightning's signature into the processes that a launcher starts by pickle."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torchhal.trainer.adapters import RunState, run_of
from torchhal_lightning._picklable import is_picklable
from torchhal_lightning._trainer_view import VIEWS, TrainerView


class CarriedFacade:
    """An attribute of torchhal's Trainer: the facade that has made it, pickled as its class and its attributes.

    What can't be pickled stays behind.

    Args:
        facade: that works by the Trainer.
    """

    def __init__(self, facade: TrainerView) -> None:
        self._facade: Callable[[], TrainerView | None] = weakref.ref(facade)
        self._arrived: tuple[Any, dict[str, Any]] | None = None

    def __getstate__(self) -> Any:
        facade = self._facade()
        if facade is None:
            return None, {}
        attributes = {name: value for name, value in vars(facade).items() if name not in (*VIEWS, "trainer")}
        arguments = attributes.pop("_arguments", {})
        kept = {name: value for name, value in attributes.items() if is_picklable(value)}
        kept["_arguments"] = {name: value if is_picklable(value) else None for name, value in arguments.items()}
        return next(cls for cls in type(facade).__mro__ if is_picklable(cls)), kept

    def __setstate__(self, state: Any) -> None:
        self._facade, self._arrived = _nothing, state

    def of(self, run: RunState) -> TrainerView | None:
        """Return the facade of ``run``, made again in a process that it has come to; None where it is gone.

        None for a trial's run too: the facade is that of the Trainer for which the trial is made.
        """
        cls, attributes = self._arrived or (None, {})
        if cls is None:
            found = self._facade()
            return found if found is not None and run_of(found.trainer) is run else None
        facade: TrainerView = object.__new__(cls)
        TrainerView.__init__(facade, run)
        vars(facade).update(attributes, trainer=run.trainer)
        self._facade, self._arrived = weakref.ref(facade), None
        return facade


def _nothing() -> None: ...
