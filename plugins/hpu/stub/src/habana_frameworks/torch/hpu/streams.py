"""Streams of the device."""

from __future__ import annotations

from typing import Any

from habana_frameworks_stub.device import DEVICE

__all__ = ["Stream", "current_stream", "default_stream", "set_stream", "stream"]

Stream = DEVICE.Stream


def current_stream(device: Any = None) -> Any:
    return DEVICE.current_stream()


def default_stream(device: Any = None) -> Any:
    return DEVICE.default_stream()


def set_stream(stream: Any) -> None:
    if stream is not None:
        DEVICE.set_stream(stream)


def stream(stream: Any) -> Any:
    return DEVICE.stream(stream)
