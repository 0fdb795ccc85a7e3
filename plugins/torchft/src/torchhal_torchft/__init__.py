"""Fault-tolerant data parallel training with TorchFT: replica groups leave and come back, the others train on."""

__version__ = "0.1.0"
