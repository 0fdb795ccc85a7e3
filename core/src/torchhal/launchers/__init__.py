"""Launchers: how the processes of a strategy come to be."""

from torchhal.launchers.base import Launcher

__all__ = ["Launcher"]
