"""Check the settings of a replica group's run before anything starts."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from typing import Any, Final

from torchhal.errors import ConfigurationError

LIGHTHOUSE: Final = "TORCHFT_LIGHTHOUSE"
"""Environment variable, TorchFT's own: the lighthouse's address."""

REPLICA_RANK: Final = "REPLICA_GROUP_ID"
NUM_REPLICA_GROUPS: Final = "NUM_REPLICA_GROUPS"
"""Environment variables that TorchFT's launcher sets."""

_URL: Final = r"(https?://)?([^\s/:\[\]]+|\[[0-9a-fA-F:.]+\]):\d{1,5}/?"

START: Final = "torchft_lighthouse --min_replicas 1 --bind '[::]:29510'"


@dataclass(frozen=True)
class Settings:
    """The checked arguments of :class:`~torchhal_torchft.strategy.TorchFTStrategy`, which documents them."""

    lighthouse_addr: str
    replica_id: str | None
    replica_rank: int | None
    num_replica_groups: int | None
    min_replica_size: int
    timeout: timedelta
    quorum_timeout: timedelta
    connect_timeout: timedelta
    heartbeat_interval: timedelta
    quorum_retries: int
    max_retries: int | None
    init_sync: bool
    hostname: str
    port: int | None
    verbose: bool

    @property
    def share(self) -> dict[str, int] | None:
        """The sampler's ``num_replicas`` and ``rank``; None where each group reads all data."""
        if self.num_replica_groups is None or self.replica_rank is None:
            return None
        return {"num_replicas": self.num_replica_groups, "rank": self.replica_rank}


def check(
    *,
    lighthouse_addr: Any,
    replica_id: Any,
    replica_rank: Any,
    num_replica_groups: Any,
    min_replica_size: Any,
    timeout: Any,
    quorum_timeout: Any,
    connect_timeout: Any,
    heartbeat_interval: Any,
    quorum_retries: Any,
    max_retries: Any,
    init_sync: Any,
    hostname: Any,
    port: Any,
    verbose: Any,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Return settings from arguments or, where these are None, the environment.

    Raises:
        ConfigurationError: a value that is missing, or that can't be.
    """
    rank, groups = _share(replica_rank, num_replica_groups, environ)
    if replica_id is not None and (not isinstance(replica_id, str) or not re.fullmatch(r"[\w.-]+", replica_id)):
        raise _wrong("replica_id", "letters, digits, dots, dashes and underscores", replica_id)
    if replica_id is None and rank is not None:
        replica_id = f"replica_{rank}"
    if hostname is not None and (not isinstance(hostname, str) or not hostname):
        raise _wrong("hostname", "this host's name or address, as the other groups reach it", hostname)
    if _time("quorum_timeout", quorum_timeout) <= _time("timeout", timeout):
        raise ConfigurationError(
            "'quorum_timeout' must be more than 'timeout', or whoever waits for a group that is stuck in a collective "
            f"gives up before it does (got {quorum_timeout.total_seconds():g} s and {timeout.total_seconds():g} s)"
        )
    return Settings(
        lighthouse_addr=_lighthouse(lighthouse_addr, environ),
        replica_id=replica_id,
        replica_rank=rank,
        num_replica_groups=groups,
        min_replica_size=_count("min_replica_size", min_replica_size, 1),
        timeout=timeout,
        quorum_timeout=quorum_timeout,
        connect_timeout=_time("connect_timeout", connect_timeout),
        heartbeat_interval=_time("heartbeat_interval", heartbeat_interval),
        quorum_retries=_count("quorum_retries", quorum_retries, 0),
        max_retries=None if max_retries is None else _count("max_retries", max_retries, 0),
        init_sync=_flag("init_sync", init_sync),
        hostname=socket.gethostname() if hostname is None else hostname,
        port=None if port is None else _count("port", port, 0, 65535),
        verbose=_flag("verbose", verbose),
    )


def _wrong(name: str, what: str, value: Any) -> ConfigurationError:
    return ConfigurationError(f"'{name}' must be {what} (got {value!r})")


def _lighthouse(value: Any, environ: Mapping[str, str]) -> str:
    """Return the address as TorchFT needs it, a URL; ``host:port`` becomes one."""
    name = "lighthouse_addr"
    if value is None:
        name, value = LIGHTHOUSE, environ.get(LIGHTHOUSE)
    if not value:
        raise ConfigurationError(
            "strategy 'torchft' needs a lighthouse, through which the replica groups find each other: start one with "
            f"`{START}`, and give its address as lighthouse_addr=... or in the environment, "
            f"{LIGHTHOUSE}=http://host:29510"
        )
    if not isinstance(value, str) or not re.fullmatch(_URL, value):
        raise _wrong(name, "the lighthouse's address, such as 'http://host:29510'", value)
    return value if "://" in value else f"http://{value}"


def _share(rank: Any, groups: Any, environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    if rank is None and groups is None:
        names, values = (REPLICA_RANK, NUM_REPLICA_GROUPS), (environ.get(REPLICA_RANK), environ.get(NUM_REPLICA_GROUPS))
        rank, groups = (_number(name, text) for name, text in zip(names, values, strict=True))
    else:
        names = ("replica_rank", "num_replica_groups")
    if rank is None and groups is None:
        return None, None
    for name, value, other in ((names[0], rank, names[1]), (names[1], groups, names[0])):
        if value is None:
            raise ConfigurationError(
                f"'{name}' must be given with '{other}': a group's share of the data is one of so many"
            )
    found = _count(names[1], groups, 1)
    return _count(names[0], rank, 0, found - 1), found


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise _wrong(name, "a number", text) from None


def _count(name: str, value: Any, least: int, most: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise _wrong(name, f"an int of at least {least}{limit}", value)
    return int(value)


def _time(name: str, value: Any) -> timedelta:
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise _wrong(name, "a positive datetime.timedelta", value)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "a bool", value)
    return value
