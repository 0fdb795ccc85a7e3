"""Exchange the Trainer that libraries construct themselves by torchhal's with Lightning's signature."""

from __future__ import annotations

import sys
from importlib import import_module, util
from typing import Any

from torchhal_lightning import _trees as trees


def install() -> None:
    """Let ``Trainer`` of Lightning's packages be :class:`.trainer.Trainer` from here on, in this process.

    Modules that have imported it under this name already have it too. Call it before a library subclasses Lightning's
    Trainer.

    Raises:
        ModuleNotFoundError: Lightning isn't installed.
    """
    if not any(util.find_spec(root.partition(".")[0]) for root in trees.ROOTS):
        raise ModuleNotFoundError("Lightning is not installed: pip install lightning")
    from torchhal_lightning.trainer import Trainer

    roots = [root for root in trees.ROOTS if util.find_spec(root.partition(".")[0])]
    own = {"__module__": Trainer.__module__, "__doc__": Trainer.__doc__}
    exchanged = [(_original(root), type("Trainer", (Trainer,), {**own, "tree": root})) for root in roots]
    for module in list(sys.modules.values()):
        attributes: dict[str, Any] = getattr(module, "__dict__", {})
        for original, ours in exchanged:
            if attributes.get("Trainer") is original:
                attributes["Trainer"] = ours


def _original(root: str) -> Any:
    return import_module(f"{root}.trainer.trainer").Trainer
