"""Check the strategy's arguments for Bagua itself, and give those that it reads from the environment."""

from __future__ import annotations

from typing import Any

from torchhal.errors import ConfigurationError


def environment_variables(
    *, flatten: Any, find_unused_parameters: Any, service_port: Any, autotune: Any, bucket_cap_mb: Any
) -> dict[str, str]:
    """Return the environment variables for these arguments of :class:`~torchhal_bagua.BaguaStrategy`.

    Raises:
        ConfigurationError: a value that can't be.
    """
    for name, value, good, what in (
        ("flatten", flatten, isinstance(flatten, bool), "a bool"),
        ("find_unused_parameters", find_unused_parameters, isinstance(find_unused_parameters, bool), "a bool"),
        ("service_port", service_port, service_port is None or _is_port(service_port), "a port, 1 to 65535"),
        ("autotune", autotune, autotune is None or isinstance(autotune, bool), "a bool"),
        ("bucket_cap_mb", bucket_cap_mb, bucket_cap_mb is None or _is_size(bucket_cap_mb), "a number above 0"),
    ):
        if not good:
            raise ConfigurationError(f"{name!r} must be {what} (got {value!r})")
    variables: dict[str, str] = {}
    if service_port is not None:
        variables["BAGUA_SERVICE_PORT"] = str(service_port)
    if autotune is not None:
        variables["BAGUA_AUTOTUNE"] = str(int(autotune))
    if bucket_cap_mb is not None:
        variables["BAGUA_DEFAULT_BUCKET_SIZE"] = str(max(1, int(bucket_cap_mb * 1024**2)))
    return variables


def _is_port(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
