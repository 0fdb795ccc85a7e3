"""The backend of torch.compile; imported in eager mode only."""

from . import backends as backends
