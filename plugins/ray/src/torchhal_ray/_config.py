"""Check the arguments of :class:`torchhal_ray.RayEnvironment`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchhal.errors import ConfigurationError
from torchhal_ray._placement import STRATEGIES


def check(*, num_workers: Any, placement: Any, timeout: Any, stop_timeout: Any, runtime_env: Any, init: Any) -> None:
    """Raise ConfigurationError for an argument outside its domain."""
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1
    ):
        raise ConfigurationError(f"'num_workers' must be an int of at least 1 (got {num_workers!r})")
    if placement not in STRATEGIES:
        raise ConfigurationError(f"'placement' must be one of {', '.join(map(repr, STRATEGIES))} (got {placement!r})")
    if num_workers is None and placement != "PACK":
        raise ConfigurationError(
            f"'placement' goes with 'num_workers' (got {placement!r} alone): devices= and num_nodes= say "
            "themselves how many workers are on a node"
        )
    for name, value in (("timeout", timeout), ("stop_timeout", stop_timeout)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigurationError(f"'{name}' must be a number of seconds (got {value!r})")
    for name, mapping in (("runtime_env", runtime_env), ("init", init)):
        if mapping is not None and not isinstance(mapping, Mapping):
            raise ConfigurationError(f"'{name}' must be a dict (got {mapping!r})")


def check_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a worker that are above 0, as floats.

    Raises:
        ConfigurationError: they are no dict of names and amounts, or all 0.
    """
    wrong = not isinstance(resources, Mapping) or any(
        not isinstance(name, str) or isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0
        for name, amount in resources.items()
    )
    if wrong or not any(resources.values()):
        raise ConfigurationError(
            "'resources_per_worker' must be a dict of Ray's resource names and amounts, such as {'CPU': 4, 'GPU': 1} "
            f"(got {resources!r})"
        )
    return {name: float(amount) for name, amount in resources.items() if amount}
