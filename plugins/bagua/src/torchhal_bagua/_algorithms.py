"""Describe Bagua's algorithms: the options of each, and what it can't work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torchhal.errors import ConfigurationError


@dataclass(frozen=True)
class _Option:
    says: str
    fits: Callable[[Any], bool]


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_BOOL: Final = _Option("a bool", lambda value: isinstance(value, bool))
_FROM_ONE: Final = _Option("an int of at least 1", lambda value: _count(value, 1))
_FROM_ZERO: Final = _Option("an int of at least 0", lambda value: _count(value, 0))
_ALL: Final = _Option("'all'", lambda value: value == "all")
_PEERS: Final = _Option("'all' or 'shift_one'", lambda value: value in ("all", "shift_one"))


@dataclass(frozen=True)
class Algorithm:
    """One of Bagua's algorithms.

    Attributes:
        options: its arguments, by name.
        own_weights: the ranks' weights differ between averages, and their gradients are their own.
        pauses: its part in a backward can be left out (``no_sync``), so that gradients add up before they are sent.
        tolerances: see :attr:`torchhal.strategies.Strategy.tolerances`; empty for one that averages gradients exactly.
    """

    options: Mapping[str, _Option]
    own_weights: bool = False
    pauses: bool = True
    tolerances: Mapping[str, float] = field(default_factory=dict)


# About twice what the conformance kit's model shows with two and three ranks.
_IN_BYTES: Final[Mapping[str, float]] = {"weights": 2e-3, "losses": 5e-3, "gradient_norm": 5e-3}
_OWN_WEIGHTS: Final[Mapping[str, float]] = {"weights": 0.05, "losses": 0.3, "gradient_norm": 1.0}
"""A step is that of the mean gradient only as far as the ranks' weights agree, and the norm is each rank's own."""

ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "gradient_allreduce": Algorithm({"hierarchical": _BOOL, "average": _BOOL}),
    "bytegrad": Algorithm({"hierarchical": _BOOL, "average": _BOOL}, tolerances=_IN_BYTES),
    "decentralized": Algorithm(
        {"hierarchical": _BOOL, "peer_selection_mode": _PEERS, "communication_interval": _FROM_ONE},
        own_weights=True,
        pauses=False,  # weights are sent in forward, and what came back is written in a backward that isn't left out
        tolerances=_OWN_WEIGHTS,
    ),
    "low_precision_decentralized": Algorithm(
        {"hierarchical": _BOOL, "communication_interval": _FROM_ONE}, own_weights=True, tolerances=_OWN_WEIGHTS
    ),
    "qadam": Algorithm({"hierarchical": _BOOL}),
    "async": Algorithm(
        # with an interval of 0 Bagua would unlock what it never locked
        {"peer_selection_mode": _ALL, "sync_interval_ms": _FROM_ONE, "warmup_steps": _FROM_ZERO},
        own_weights=True,
        pauses=False,  # the weights are locked in forward, until a backward that isn't left out
        tolerances=_OWN_WEIGHTS,
    ),
}


def check(name: Any, options: Mapping[str, Any], *, flatten: bool) -> None:
    """Check an algorithm's name and options.

    Raises:
        ConfigurationError: no such algorithm, or a value that it can't have.
        TypeError: no such option.
    """
    if name not in ALGORITHMS:
        raise ConfigurationError(f"'algorithm' must be one of {', '.join(map(repr, ALGORITHMS))} (got {name!r})")
    algorithm = ALGORITHMS[name]
    if unknown := sorted(set(options) - set(algorithm.options)):
        raise TypeError(
            f"BaguaStrategy(algorithm={name!r}) takes no argument {', '.join(map(repr, unknown))}: beside the "
            f"strategy's own it has {', '.join(algorithm.options)}"
        )
    for key, value in options.items():
        if not algorithm.options[key].fits(value):
            raise ConfigurationError(
                f"{key!r} must be {algorithm.options[key].says} for algorithm {name!r} (got {value!r})"
            )
    if name == "async" and not flatten:
        raise ConfigurationError("'flatten' must be True for algorithm 'async', which adds to all weights at once")
