"""Train by a loop of the user's own, on the strategies, launchers and checkpoints of the Trainer."""

from torchhal.run._run import Run

__all__ = ["Run"]
