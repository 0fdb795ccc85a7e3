"""Declare what a plugin contributes: hook markers, hookspecs, :class:`Component` and :class:`Availability`.

Standard library and pluggy only: a manifest is imported for a mere listing of plugins, so nothing here may
pull in torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pluggy

from torchhal._terminal import printable

__all__ = [
    "HOOKS",
    "KINDS",
    "Availability",
    "Candidate",
    "Component",
    "hookimpl",
]

PROJECT: Final = "torchhal"
"""The pluggy project name, and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a manifest's functions as hooks."""

HOOKS: Final[Mapping[str, str]] = {
    "accelerator": "torchhal_accelerators",
    "precision": "torchhal_precisions",
    "checkpoint_io": "torchhal_checkpoint_ios",
    "cluster_environment": "torchhal_cluster_environments",
    "strategy": "torchhal_strategies",
    "logger": "torchhal_loggers",
    "callback": "torchhal_callbacks",
    "default_logger": "torchhal_default_loggers",
    "default_callback": "torchhal_default_callbacks",
    "command": "torchhal_commands",
    "model_adapter": "torchhal_model_adapters",
}
"""Kind of component -> the hook that contributes components of this kind."""

KINDS: Final = (
    "accelerator", "precision", "checkpoint_io", "cluster_environment", "strategy", "logger", "callback",
)  # fmt: skip
"""The kinds that a Trainer takes by alias."""

ALIAS_MAX_LENGTH: Final = 64
_ALIAS = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
# The field names its precisions by bit width ("32-true", "16-mixed"): this kind alone may start with a digit.
_PRECISION_ALIAS = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")
_TARGET = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Availability:
    """The answer whether a component can be used here and, if not, why.

    ``reason`` is never empty when ``ok`` is false; it names the missing package, device or setting, in one line.
    Control characters in it become escapes.
    """

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.ok, bool):
            raise TypeError(f"'ok' must be a bool (got {self.ok!r})")
        if not self.ok and not self.reason.strip():
            raise ValueError("'reason' must say why the part is unavailable (got an empty string)")
        object.__setattr__(self, "reason", printable(self.reason))

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Candidate:
    """A form of a strategy that ``strategy="auto"`` may choose, if the training fits into memory with it.

    Args:
        cost: its place among the candidates of all strategies, which are tried from the lowest on: what it costs in
            time, compared with those of core: 0 is one device, 10 is ddp.
        options: keyword arguments for the constructor, beside the component's defaults.
        recomputes: it computes activations once more instead of keeping them, and is tried only where these decide.
        splits_batches: it computes a batch in parts, and is not tried for a model whose batch norms would see them.
        multiple_of: the number of processes that it needs, or a multiple of it; with others it is left out.
        within_node: these processes send each other much, and it is left out where they would be on several nodes.

    .. versionadded:: 0.2
    """

    cost: float
    options: Mapping[str, Any] = field(default_factory=dict)
    recomputes: bool = False
    splits_batches: bool = False
    multiple_of: int = 1
    within_node: bool = False

    def problem(self) -> str | None:
        """Return the reason why this record can't be used, or None when it is valid."""
        if isinstance(self.cost, bool) or not isinstance(self.cost, int | float) or not 0 <= self.cost < 1e9:
            return f"the 'cost' of a candidate must be a number from 0 (got {self.cost!r})"
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            return f"the 'options' of a candidate must be a mapping of keyword arguments (got {self.options!r})"
        if isinstance(self.multiple_of, bool) or not isinstance(self.multiple_of, int) or self.multiple_of < 1:
            return f"'multiple_of' of a candidate must be an int of at least 1 (got {self.multiple_of!r})"
        return None


@dataclass(frozen=True)
class Component:
    """One part that a plugin provides, described without importing it.

    Args:
        alias: the name users write, ``[a-z][a-z0-9]*`` with single dashes or underscores inside, at most 64
            characters, looked up without case. A precision may start with a digit. Never ``auto``.
        target: ``"package.module:Class"``, imported on first use.
        summary: one line for ``torchhal plugins``.
        defaults: keyword arguments for the constructor; copied for each instance, overridden by the user's.
        requires: top-level modules of the vendor's SDK; a missing one makes the part unavailable with its
            name as the reason. A tuple, not a string.
        aliases: other names for the same part, under the same rule. A tuple, not a string.
        candidates: of a strategy, the forms in which ``strategy="auto"`` may choose it; none by default. A tuple.

    A wrong value makes this component unusable, with the reason from :meth:`problem`; it never costs the
    plugin its other components, so nothing is raised here.
    """

    alias: str
    target: str
    summary: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    def problem(self, kind: str) -> str | None:
        """Return the reason why this record can't be used as a ``kind``, or None when it is valid."""
        if reason := alias_problem(self.alias, kind):
            return reason
        if not isinstance(self.target, str) or not _TARGET.fullmatch(self.target):
            return f"'target' must be 'package.module:Class' (got {self.target!r})"
        summary: object = self.summary  # what it is annotated as is what is being checked
        if not isinstance(summary, str):
            return f"'summary' must be a str (got {self.summary!r})"
        if not isinstance(self.defaults, Mapping) or not all(isinstance(k, str) for k in self.defaults):
            return f"'defaults' must be a mapping of keyword arguments (got {self.defaults!r})"
        for name in ("requires", "aliases"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                return f"'{name}' must be a tuple of str (got {value!r})"
        for module in self.requires:
            if not module.isidentifier():
                return f"'requires' must hold names of top-level modules (got {module!r})"
        for other in self.aliases:
            if reason := alias_problem(other, kind):
                return reason
        return self._problem_of_candidates(kind)

    def _problem_of_candidates(self, kind: str) -> str | None:
        given: object = self.candidates
        if not isinstance(given, tuple) or not all(isinstance(item, Candidate) for item in given):
            return f"'candidates' must be a tuple of Candidate (got {given!r})"
        if given and kind != "strategy":
            return f"'candidates' are forms of a strategy, and this is a {kind.replace('_', ' ')}"
        return next(filter(None, (candidate.problem() for candidate in self.candidates)), None)


def alias_problem(alias: object, kind: str) -> str | None:
    """Return why ``alias`` can't name a part of this ``kind``, or None."""
    if not isinstance(alias, str):
        return f"an alias must be a str (got {alias!r})"
    if alias == "auto":
        return "the alias 'auto' is reserved: it asks torchhal to choose"
    if len(alias) > ALIAS_MAX_LENGTH:
        return f"an alias must have at most {ALIAS_MAX_LENGTH} characters (got {len(alias)}: {alias!r})"
    pattern = _PRECISION_ALIAS if kind == "precision" else _ALIAS
    if not pattern.fullmatch(alias):
        return (
            "an alias must be lower-case letters and digits, a letter first, with single dashes or underscores "
            f"inside (got {alias!r})"
        )
    return None


class Hookspecs:
    """The hooks, one per kind of component. Each returns records and changes nothing."""

    @hookspec
    def torchhal_accelerators(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return accelerators: targets are subclasses of ``torchhal.accelerators.Accelerator``."""

    @hookspec
    def torchhal_precisions(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return precisions: targets are subclasses of ``torchhal.precision.Precision``."""

    @hookspec
    def torchhal_checkpoint_ios(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return checkpoint IOs: targets are subclasses of ``torchhal.checkpoint.CheckpointIO``."""

    @hookspec
    def torchhal_cluster_environments(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return cluster environments: targets are subclasses of ``torchhal.cluster.ClusterEnvironment``."""

    @hookspec
    def torchhal_strategies(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return strategies: targets are subclasses of ``torchhal.strategies.Strategy``."""

    @hookspec
    def torchhal_loggers(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return loggers: targets are subclasses of ``torchhal.trainer.loggers.Logger``.

        .. versionadded:: 0.2
        """

    @hookspec
    def torchhal_callbacks(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return callbacks: targets are subclasses of ``torchhal.trainer.callbacks.Callback``.

        .. versionadded:: 0.2
        """

    @hookspec
    def torchhal_default_loggers(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return loggers that every Trainer with a logger has beside those that it is given.

        An organisation ships them in a package of its own, which declares them in its metadata as well, as
        ``ledger = "logger"`` in the entry points' group ``torchhal.defaults``: a Trainer imports no other manifest to
        look for them. One without such a line is in no Trainer; ``torchhal plugins`` names it, with the line to add.
        ``TORCHHAL_DEFAULTS=0`` leaves them out.

        .. versionadded:: 0.2
        """

    @hookspec
    def torchhal_default_callbacks(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return callbacks that every Trainer has, except one that is given a callback of the same class.

        An organisation ships them in a package of its own, which declares them in its metadata as well, as
        ``audit = "callback"`` in the entry points' group ``torchhal.defaults``; one without such a line is in no
        Trainer. ``TORCHHAL_DEFAULTS=0`` leaves them out.

        .. versionadded:: 0.2
        """

    @hookspec
    def torchhal_model_adapters(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return model adapters: targets are subclasses of ``torchhal.trainer.adapters.ModelAdapter``."""

    @hookspec
    def torchhal_commands(self) -> Sequence[Component]:  # type: ignore[empty-body]
        """Return sub-commands of ``torchhal``: the alias is the command's name, the target a function.

        It is called with the ``argparse.ArgumentParser`` of the command, adds its arguments, and sets the default
        ``run`` to a function from the parsed arguments to the exit code. See :mod:`torchhal.cli` for what prints.
        """
