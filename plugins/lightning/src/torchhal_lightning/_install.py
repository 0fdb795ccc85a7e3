"""Exchange the Trainer that libraries construct themselves by torchhal's with Lightning's signature."""

from __future__ import annotations

import sys
from importlib import import_module, util
from typing import Any

from torchhal_lightning import _trees as trees


def install() -> None:
    """Let ``Trainer`` of Lightning's packages be :class:`.trainer.Trainer` from here on, in this process.

    Modules that have imported the name already have it too. Call it before a library subclasses Lightning's Trainer.

    Raises:
        ModuleNotFoundError: Lightning isn't installed.
    """
    if not any(util.find_spec(root.partition(".")[0]) for root in trees.ROOTS):
        raise ModuleNotFoundError("Lightning is not installed: pip install lightning")
    from torchhal_lightning.trainer import Trainer

    originals = [_original(root) for root in trees.ROOTS if util.find_spec(root.partition(".")[0])]
    for module in list(sys.modules.values()):
        attributes: dict[str, Any] = getattr(module, "__dict__", {})
        for original in originals:
            if attributes.get("Trainer") is original:
                attributes["Trainer"] = Trainer


def _original(root: str) -> Any:
    return import_module(f"{root}.trainer.trainer").Trainer
