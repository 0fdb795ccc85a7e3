"""Check the settings of a peer's run before anything starts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from torchhal.errors import ConfigurationError

PEERS: Final = "TORCHHAL_HIVEMIND_PEERS"
"""Environment variable: addresses of peers to join, with commas between them."""

TARGET_BATCH_SIZE: Final = "TORCHHAL_HIVEMIND_TARGET_BATCH_SIZE"
RUN_ID: Final = "TORCHHAL_HIVEMIND_RUN_ID"

COMPRESSIONS: Final[Mapping[str, str]] = {
    "none": "NoCompression",
    "float16": "Float16Compression",
    "scaled_float16": "ScaledFloat16Compression",
    "uniform8bit": "Uniform8BitQuantization",
    "quantile8bit": "Quantile8BitQuantization",
}
"""Name -> the class in ``hivemind.compression``."""

AVERAGING: Final = ("gradients", "state")


@dataclass(frozen=True)
class Settings:
    """The checked arguments of :class:`~torchhal_hivemind.strategy.HivemindStrategy`, which documents them."""

    target_batch_size: int
    run_id: str
    initial_peers: tuple[str, ...]
    batch_size: int | None
    averaging: str
    average_state_every: int
    compression: str
    state_compression: str
    host_addresses: tuple[str, ...]
    announced_addresses: tuple[str, ...]
    client_mode: bool
    matchmaking_time: float
    averaging_timeout: float
    request_timeout: float
    join_timeout: float
    refresh_period: float
    peer_expiration: float
    verbose: bool

    @property
    def agreement(self) -> dict[str, Any]:
        """The settings that all peers of a run must have in common."""
        return {name: getattr(self, name) for name in ("target_batch_size", "averaging", "average_state_every")}


def check(
    *,
    target_batch_size: Any,
    run_id: Any,
    initial_peers: Any,
    batch_size: Any,
    averaging: Any,
    average_state_every: Any,
    compression: Any,
    state_compression: Any,
    host_addresses: Any,
    announced_addresses: Any,
    client_mode: Any,
    matchmaking_time: Any,
    averaging_timeout: Any,
    request_timeout: Any,
    join_timeout: Any,
    refresh_period: Any,
    peer_expiration: Any,
    verbose: Any,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Return settings from arguments or, where these are None, from the environment.

    Raises:
        ConfigurationError: a value that is missing, or that can't be.
    """
    peers = _addresses("initial_peers", initial_peers, environ.get(PEERS), PEERS)
    for peer in peers:
        if not re.search(r"/(p2p|ipfs)/\w+$", peer):
            raise _wrong("initial_peers", "addresses that end with the peer's name, such as "
                         "'/ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...'", peer)  # fmt: skip
    if compression != "none" and averaging == "state":
        raise ConfigurationError(
            f"'compression' is for gradients, and averaging='state' sends none (got compression={compression!r}): "
            "use 'state_compression'"
        )
    matchmaking = _seconds("matchmaking_time", matchmaking_time)
    timeout = _seconds("averaging_timeout", averaging_timeout)
    request = min(3.0, matchmaking / 2) if request_timeout is None else _seconds("request_timeout", request_timeout)
    for small, its, large, whose in (
        ("request_timeout", request, "matchmaking_time", matchmaking),
        ("matchmaking_time", matchmaking, "averaging_timeout", timeout),
    ):
        if its >= whose:  # requests would time out before matchmaking ends, and the peers' weights diverge
            raise ConfigurationError(f"'{small}' must be less than '{large}' (got {its:g} s and {whose:g} s)")
    return Settings(
        target_batch_size=_target(target_batch_size, environ),
        run_id=_run_id(run_id, environ),
        initial_peers=peers,
        batch_size=None if batch_size is None else _count("batch_size", batch_size),
        averaging=_choice("averaging", averaging, AVERAGING),
        average_state_every=_count("average_state_every", average_state_every),
        compression=_choice("compression", compression, COMPRESSIONS),
        state_compression=_choice("state_compression", state_compression, COMPRESSIONS),
        host_addresses=_addresses("host_addresses", host_addresses),
        announced_addresses=_addresses("announced_addresses", announced_addresses),
        client_mode=_flag("client_mode", client_mode),
        matchmaking_time=matchmaking,
        averaging_timeout=timeout,
        request_timeout=request,
        join_timeout=_seconds("join_timeout", join_timeout),
        refresh_period=_seconds("refresh_period", refresh_period),
        peer_expiration=_seconds("peer_expiration", peer_expiration),
        verbose=_flag("verbose", verbose),
    )


def _wrong(name: str, what: str, value: Any) -> ConfigurationError:
    return ConfigurationError(f"'{name}' must be {what} (got {value!r})")


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise _wrong(name, "an int of at least 1", value)
    return int(value)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise _wrong(name, "a number of seconds above 0", value)
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "a bool", value)
    return value


def _choice(name: str, value: Any, allowed: Sequence[str] | Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _wrong(name, f"one of {', '.join(map(repr, allowed))}", value)
    return value


def _target(value: Any, environ: Mapping[str, str]) -> int:
    if value is not None:
        return _count("target_batch_size", value)
    text = environ.get(TARGET_BATCH_SIZE, "")
    if not text:
        raise ConfigurationError(
            "'target_batch_size' must be given, the number of samples from all peers together that make one step: "
            f"HivemindStrategy(target_batch_size=...), or {TARGET_BATCH_SIZE} in the environment"
        )
    return _from_text(TARGET_BATCH_SIZE, text, lambda: _count(TARGET_BATCH_SIZE, int(text)))


def _from_text(name: str, text: str, read: Callable[[], int]) -> int:
    try:
        return read()
    except ValueError:  # ConfigurationError is one
        raise _wrong(name, "an int of at least 1", text) from None


def _run_id(value: Any, environ: Mapping[str, str]) -> str:
    name, value = ("run_id", value) if value is not None else (RUN_ID, environ.get(RUN_ID) or "torchhal")
    if not isinstance(value, str) or not re.fullmatch(r"[\w-]+", value):  # keys of the DHT have dots and more in them
        raise _wrong(name, "letters, digits, dashes and underscores", value)
    return value


def _addresses(name: str, value: Any, text: str | None = None, variable: str = "") -> tuple[str, ...]:
    """Return multiaddresses, given as several or as one string with commas between them."""
    if value is None:
        name, value = (variable, text) if text else (name, ())
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence) or isinstance(items, bytes):
        raise _wrong(name, "addresses, several or in one str with commas between them", value)
    found = tuple(str(item).strip() for item in items)
    for address in filter(None, found):
        if not address.startswith("/"):
            raise _wrong(name, "multiaddresses such as '/ip4/203.0.113.5/tcp/4001'", address)
    return tuple(filter(None, found))
