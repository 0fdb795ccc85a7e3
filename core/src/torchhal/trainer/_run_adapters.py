"""Find the adapter of each object that was written for another framework, and act through it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torchhal import registry
from torchhal._overrides import note_framework
from torchhal.resolve import Request
from torchhal.trainer._run_part import RunPart

_log = logging.getLogger("torchhal")

_OWN = frozenset({"abc", "builtins", "collections", "torch", "torchhal", "typing", "__main__"})
"""Packages whose classes are nobody's to adapt."""


class Adapters(RunPart[Any]):
    """The model adapters of a run, made when an object first asks for one."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._by_class: dict[type, Any] = {}
        self._made: dict[type, Any] = {}
        self._begun: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_by_class": {}, "_made": {}, "_begun": []}  # each process makes its own

    def of(self, owner: Any) -> Any:
        """Return the adapter of a model, data module, callback or logger; None for one that needs none."""
        cls = type(owner)
        if cls not in self._by_class:
            self._by_class[cls] = self._find(cls)
        return self._by_class[cls]

    def _find(self, cls: type) -> Any:
        packages = _packages(cls)
        if not packages:
            return None
        entry = registry.adapter_of(packages)
        if entry is None:
            return None
        kind = entry.load()
        if kind not in self._made:
            self._made[kind] = kind(self.run)
        note_framework(cls)
        return self._made[kind]

    def adapt_request(self, request: Request) -> Request:
        """Return the hardware arguments with torchhal's parts in place of those of another framework."""
        several = isinstance(request.plugins, Sequence) and not isinstance(request.plugins, str)
        plugins = request.plugins if several else (request.plugins,)
        parts = (request.accelerator, request.strategy, request.precision, *plugins)
        objects = [part for part in parts if not isinstance(part, str | int | Mapping | type | None)]
        for adapter in dict.fromkeys(filter(None, map(self.of, objects))):
            request = adapter.adapt_request(request)
        return request

    def adapts(self, owner: Any) -> bool:
        """Return whether ``owner`` was written for another framework."""
        return self.of(owner) is not None

    def trainer_for(self, owner: Any) -> Any:
        """Return the Trainer as ``owner`` expects it."""
        adapter = self.of(owner)
        return self.run.trainer if adapter is None else adapter.trainer

    def bind_model(self, model: Any, name: str) -> Callable[..., Any]:
        """Return the hook ``name`` of a model."""
        adapter = self.of(model)
        body: Callable[..., Any] = getattr(model, name) if adapter is None else adapter.bind_model(model, name)
        return body

    def bind_callback(self, callback: Any, name: str) -> Callable[..., Any]:
        """Return the hook ``name`` of a callback, called with (trainer, module, ...)."""
        adapter = self.of(callback)
        body: Callable[..., Any] = getattr(callback, name) if adapter is None else adapter.bind_callback(callback, name)
        return body

    def adapt_loaders(self, model: Any, stage: str, loaders: Any) -> Any:
        """Return what feeds ``stage`` of a model, given as its framework lets it be given; None stays None."""
        adapter = None if loaders is None else self.of(model)
        return loaders if adapter is None else adapter.adapt_loaders(stage, loaders)

    def set_training_mode(self, model: Any) -> None:
        """Put a model into training mode, as a fit begins."""
        adapter = self.of(model)
        if adapter is None:
            model.train()
        else:
            adapter.set_training_mode(model)

    def exhausts_samplers(self, model: Any) -> bool:
        """Return whether a loop over a model's data reaches the end of the sampler."""
        adapter = self.of(model)
        exhausts: bool = adapter is None or adapter.exhausts_samplers
        return exhausts

    def validates_when_stopped(self, model: Any) -> bool:
        """Return whether a fit of a model that ends inside of an epoch validates once more."""
        adapter = self.of(model)
        return adapter is not None and bool(adapter.validates_when_stopped)

    def logs_by_batch(self, model: Any) -> bool:
        """Return whether step values of a model are logged every so many batches, not optimizer steps."""
        adapter = self.of(model)
        return adapter is not None and bool(adapter.logs_by_batch)

    def logged_step(self, model: Any) -> int:
        """Return the step at which loggers record what a model logs."""
        adapter = self.of(model)
        step: int = self.run.global_step if adapter is None else adapter.logged_step()
        return step

    def kind_of_callback(self, callback: Any) -> str | None:
        """Return which of the Trainer's own callbacks one stands in for, of another framework too; None for none."""
        if own := getattr(callback, "replaces", ""):
            return str(own)
        adapter = self.of(callback)
        return None if adapter is None else adapter.kind_of_callback(callback)

    def savers(self) -> list[Any]:
        """Return the ModelCheckpoints that adapters keep beside the callbacks of their frameworks."""
        return [saver for adapter in self._made.values() for saver in adapter.savers()]

    def begin_run(self) -> None:
        """Find the adapters of this call's objects, and let them begin."""
        run = self.run
        for owner in (run.module, run.datamodule, *run.callbacks, *run.loggers):
            self.of(owner)
        for adapter in self._made.values():
            self._begun.append(adapter)
            adapter.begin_run()

    def end_run(self) -> None:
        """Let the adapters end that have begun; an error of one is logged, as the run has its own end."""
        while self._begun:
            adapter = self._begun.pop()
            try:
                adapter.end_run()
            except Exception:
                _log.exception("%s.end_run failed", type(adapter).__name__)

    def follow_hook(self, name: str | None) -> None:
        """Tell the adapters which hook or step begins."""
        for adapter in self._made.values():
            adapter.follow_hook(name)


def _packages(cls: type) -> set[str]:
    """Return the packages that a class and its bases come from, ``a``, ``a.b`` and ``a.b.c`` of module ``a.b.c``."""
    found: set[str] = set()
    for module in {base.__module__ for base in cls.__mro__}:
        if module.partition(".")[0] not in _OWN:
            found.update(accumulate(module.split("."), "{}.{}".format))
    return found
