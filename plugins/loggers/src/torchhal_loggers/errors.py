"""Define the error of a logger whose service can't be used."""

from torchhal.errors import TorchhalError


class ServiceError(TorchhalError, RuntimeError):
    """A service doesn't answer, or refuses what it is sent, and the logger was asked to raise."""
