"""Serve the state of a replica group, which others fetch when they join."""

from __future__ import annotations

import urllib.request
import warnings
from datetime import timedelta
from typing import Any

from torch.distributed._serialization import _streaming_load
from torchft.checkpointing import HTTPTransport

from torchhal_torchft._state import copied


class StateTransport(HTTPTransport[dict[str, Any]]):  # type: ignore[misc]
    """The state of one group, as others fetch it by HTTP.

    Args:
        hostname: as others reach this host; TorchFT takes the name that the host gives itself.
    """

    def __init__(self, hostname: str, timeout: timedelta) -> None:
        self._hostname = f"[{hostname}]" if ":" in hostname else hostname
        super().__init__(timeout=timeout, num_chunks=0)
        self._server.RequestHandlerClass.log_message = lambda *_: None  # a line on stderr for each request

    def address(self) -> str:
        return f"http://{self._hostname}:{self._server.socket.getsockname()[1]}/checkpoint/"

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.05)  # a shutdown takes up to that long, half a second by default

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        """Read tensors and plain data only, as from any checkpoint; TorchFT would unpickle what comes."""
        with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as answer, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # hence the copy
            return copied(_streaming_load(answer, weights_only=True))

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait=wait)
        self._server.server_close()
