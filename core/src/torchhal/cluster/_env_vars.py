"""Read a launcher's variables: ints in range, and errors that name the variable.

Checks: ENV-05, ENV-06.
"""

from __future__ import annotations

import os

from torchhal.errors import ConfigurationError


def given(name: str) -> str:
    """Return a variable without blanks around it; empty when it isn't set."""
    return os.environ.get(name, "").strip()


def read_int(name: str, at_least: int, at_most: int | None = None, *, hint: str = "") -> int:
    """Return the variable as an int.

    Args:
        name: the variable.
        at_least: the least value.
        at_most: the greatest value; None for any.
        hint: the end of a message, such as what sets the variable.

    Raises:
        ConfigurationError: it is missing, garbled or out of range; the message names it.
    """
    text = read_text(name, hint=hint)
    # int() also takes "1_0", "+1" and Arabic digits: none of them was written by a launcher.
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{name} must be a whole number in the environment (got {text!r}){_because(hint)}")
    value = int(text)
    if value < at_least or (at_most is not None and value > at_most):
        bounds = f"at least {at_least}" if at_most is None else f"{at_least} to {at_most}"
        raise ConfigurationError(f"{name} must be {bounds} in the environment (got {text!r}){_because(hint)}")
    return value


def read_text(name: str, *, hint: str = "") -> str:
    """Return the variable without blanks around it.

    Args:
        name: the variable.
        hint: the end of a message, such as what sets the variable.

    Raises:
        ConfigurationError: it is missing or empty; the message names it.
    """
    text = given(name)
    if not text:
        state = "is empty" if name in os.environ else "is not set"
        raise ConfigurationError(f"{name} must be set in the environment (it {state}){_because(hint)}")
    return text


def read_address(name: str, *, hint: str = "") -> str:
    """Return a host name or address; brackets around an IPv6 literal are dropped."""
    text = read_text(name, hint=hint)
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def read_port(name: str, *, hint: str = "") -> int:
    """Return a port, 1 to 65535."""
    return read_int(name, 1, 65535, hint=hint)


def _because(hint: str) -> str:
    return f": {hint}" if hint else ""
