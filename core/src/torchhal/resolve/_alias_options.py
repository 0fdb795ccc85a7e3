"""Read an alias with options, ``{"zero3": {"cpu_offload": True}}``, as a name that carries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchhal._hyperparameters import is_omegaconf
from torchhal.errors import ConfigurationError


class AliasWithOptions(str):
    """An alias, and the keyword arguments for the constructor of what it names."""

    options: dict[str, Any]

    def __new__(cls, alias: str, options: Mapping[str, Any]) -> AliasWithOptions:
        made = super().__new__(cls, alias)
        made.options = dict(options)
        return made

    def __repr__(self) -> str:
        return repr({str(self): self.options})

    def __reduce__(self) -> Any:
        return AliasWithOptions, (str(self), self.options)


def read_alias(argument: str, value: Any) -> Any:
    """Return a mapping of one alias to its options as :class:`AliasWithOptions`, anything else as it is.

    Args:
        argument: the name of the Trainer's argument, for messages.
        value: what was given for it.

    Raises:
        ConfigurationError: a mapping of another form.
    """
    if not isinstance(value, Mapping):
        return value
    rule = f"'{argument}' with options must be one alias and a dict of them, {{'alias': {{'option': value}}}}"
    if len(value) != 1:
        raise ConfigurationError(f"{rule} (got {value!r})")
    ((alias, options),) = value.items()
    if is_omegaconf(options):
        from omegaconf import OmegaConf

        options = OmegaConf.to_container(options, resolve=True)  # its lists and dicts go on to other libraries
    if not isinstance(alias, str) or alias.strip().lower() == "auto":
        raise ConfigurationError(f"{rule}, and no {alias!r} (got {value!r})")
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ConfigurationError(f"{rule} (got {value!r})")
    return AliasWithOptions(alias, options)


def options_of(alias: str) -> dict[str, Any]:
    """Return the options that ``alias`` carries; none where it is a plain string."""
    return alias.options if isinstance(alias, AliasWithOptions) else {}


def renamed(alias: str, other: str) -> str:
    """Return ``other`` with the options of ``alias``."""
    return AliasWithOptions(other, alias.options) if isinstance(alias, AliasWithOptions) else other
