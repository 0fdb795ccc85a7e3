"""Freeze and unfreeze in a continued run what the saved one had frozen and unfrozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

KEY = "frozen"
"""The field of a checkpoint, which is missing where nothing was frozen; see :meth:`FrozenParameters.state`."""


class FrozenParameters:
    """The names of the parameters that were frozen when this fit began, before its first epoch, and are at a save."""

    def __init__(self) -> None:
        self._at_start: list[str] | None = None
        self._saved: Mapping[str, list[str]] | None = None

    def forget(self) -> None:
        """Discard the previous call's initial state and what it was to restore."""
        self._at_start = self._saved = None

    def state(self, module: nn.Module) -> dict[str, list[str]] | None:
        """Return this state for a checkpoint of ``module``; None where nothing is or was frozen."""
        if self._saved is not None:  # not restored yet: left to the run that continues from this checkpoint
            return {name: list(names) for name, names in self._saved.items()}
        now = _frozen(module)
        at_start = now if self._at_start is None else self._at_start
        return {"at_start": at_start, "at_save": now} if at_start or now else None

    def restore(self, saved: Mapping[str, list[str]] | None) -> None:
        """Remember what :meth:`state` gave for the checkpoint that this fit continues from."""
        self._saved = saved

    def begin(self, module: nn.Module, path: str | None, warn: Callable[[str], None]) -> None:
        """Freeze and unfreeze what the saved run had since its start, if this one starts as that did.

        Called on every rank, after the hooks that precede the first epoch, and with the same effect as in one.

        Args:
            module: the user's module.
            path: the checkpoint that is continued, for the warning.
            warn: called with a message where this run began with other parameters frozen.
        """
        saved = self._saved
        self._at_start, self._saved = _frozen(module), None
        if saved is None:
            return
        known = {name for name, _ in module.named_parameters()}
        here, before, at_save = set(self._at_start), known.intersection(saved["at_start"]), set(saved["at_save"])
        if here == before:
            _freeze(module, before - at_save, at_save - before)
        elif here == known & at_save:  # frozen and unfrozen already, as in a second fit of one process
            self._at_start = sorted(before)
        else:
            warn(
                f"{path!r} was saved by a run that began with other parameters frozen: "
                f"{_differences(before - here, here - before)}. This run goes on as its own code says, without what "
                "that one had frozen or unfrozen until the save: set requires_grad as that run had it before the fit, "
                "or, for the parameters that are to be trained from here on, in on_train_start"
            )


def _frozen(module: nn.Module) -> list[str]:
    return sorted(name for name, parameter in module.named_parameters() if not parameter.requires_grad)


def _freeze(module: nn.Module, train: set[str], freeze: set[str]) -> None:
    for name, parameter in module.named_parameters():
        if name in freeze or (name in train and (parameter.is_floating_point() or parameter.is_complex())):
            parameter.requires_grad_(name in train)


def _differences(there: Iterable[str], here: Iterable[str]) -> str:
    sides = (("there", sorted(there)), ("here", sorted(here)))
    return " and ".join(
        f"{', '.join(map(repr, names[:4]))}{' and others' if len(names) > 4 else ''} {side} alone"
        for side, names in sides
        if names
    )


__all__ = ["KEY", "FrozenParameters"]
