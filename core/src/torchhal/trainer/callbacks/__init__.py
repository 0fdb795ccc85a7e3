"""Callbacks: what runs beside the model at fixed points of a run, and the ready-made ones."""

from torchhal.trainer.callbacks.base import Callback

__all__ = ["Callback"]
