"""What Bagua reads from the environment, whenever it needs it."""

from __future__ import annotations

import os


def get_world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    by_torchrun = {"RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys()
    return int(os.environ.get("GROUP_RANK" if by_torchrun else "NODE_RANK", "0"))


def get_default_bucket_size() -> int:
    return int(os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE", str(10 * 1024**2)))


def get_bagua_service_port() -> int:
    return int(os.environ.get("BAGUA_SERVICE_PORT", "-1"))


def get_autotune_level() -> int:
    return int(os.environ.get("BAGUA_AUTOTUNE", "0"))
