"""Exchange the Trainer and the Tuner that libraries construct themselves by torchhal's with Lightning's signature."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module, util
from typing import Any

from torchhal_lightning import _trees as trees
from torchhal_lightning._stand_in_names import is_provided, provide

_METHODS = ("__init__", "fit", "validate", "test", "predict")


def install(*, stand_in: bool | None = None) -> None:
    """Let ``Trainer`` and ``Tuner`` of Lightning's packages be this package's from here on, in this process.

    Modules that have imported them under these names already have ours too. Call it before a library subclasses
    Lightning's Trainer.

    Where Lightning isn't installed, ``lightning``, ``lightning.pytorch``, ``lightning.fabric`` and
    ``pytorch_lightning`` become importable: :mod:`torchhal_lightning.stand_in`.

    Args:
        stand_in: True: provide these modules in Lightning's place also where it is installed; False: never.

    Raises:
        ModuleNotFoundError: Lightning isn't installed, and ``stand_in`` is False.
        ImportError: ``stand_in`` is True, and Lightning is imported already; or False, and the stand-in is.
    """
    roots = [root for root in trees.ROOTS if root.partition(".")[0] in trees.PACKAGES and _is_installed(root)]
    if stand_in or (stand_in is None and not roots):
        provide()
        return
    if is_provided():
        raise ImportError("the stand-in has Lightning's names in this process: call install(stand_in=False) before it")
    if not roots:
        raise ModuleNotFoundError("Lightning is not installed: pip install lightning")
    from torchhal_lightning.tuner import Tuner

    for root in roots:
        trainer = import_module(f"{root}.trainer.trainer").Trainer
        if getattr(trainer, "tree", None) is not None:
            continue  # installed before
        ours = _like(trainer, root)
        _exchange("Trainer", trainer, ours)
        _exchange("Tuner", import_module(f"{root}.tuner.tuning").Tuner, Tuner)
        _exchange_default(import_module(f"{root}.cli").LightningCLI, trainer, ours)


def _is_installed(root: str) -> bool:
    """Whether there is a tree of Lightning's own."""
    package = root.partition(".")[0]
    if package in sys.modules:
        return sys.modules[package].__name__ == package
    return not is_provided() and util.find_spec(package) is not None


def _exchange(name: str, original: Any, ours: Any) -> None:
    for module in list(sys.modules.values()):
        attributes: dict[str, Any] = getattr(module, "__dict__", {})
        if attributes.get(name) is original:
            attributes[name] = ours


def _exchange_default(owner: type, original: Any, ours: Any) -> None:
    """Exchange the default of a constructor's argument."""
    init: Any = owner.__init__  # type: ignore[misc]
    init.__defaults__ = tuple(ours if value is original else value for value in init.__defaults__)


def _like(original: type, root: str) -> type:
    """Return this package's Trainer with the annotations of Lightning's, which its command line makes options of."""
    from torchhal_lightning.trainer import Trainer

    methods = {name: annotated(getattr(Trainer, name), getattr(original, name)) for name in _METHODS}
    own = {"__module__": Trainer.__module__, "__doc__": original.__doc__, "tree": root}
    return type("Trainer", (Trainer,), {**own, **methods})


def annotated(body: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Return a method of ``body`` with the signature and the annotations of ``original``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(self, *args, **kwargs)

    original = inspect.unwrap(original)
    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    method.__annotations__ = dict(original.__annotations__)
    method.__name__, method.__qualname__, method.__doc__ = original.__name__, original.__qualname__, original.__doc__
    return method
