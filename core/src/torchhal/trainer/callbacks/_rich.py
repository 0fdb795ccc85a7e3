"""Check that rich is installed, for the callbacks that draw with it."""

from __future__ import annotations


def require_rich(user: str) -> None:
    """Raise ModuleNotFoundError if rich can't be imported.

    Args:
        user: the name of what needs it, for the message.
    """
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{user} needs the package rich, which is not installed: pip install torchhal[rich]", name="rich"
        ) from error
