"""The strategies that plain PyTorch can carry: parts of one model on several ranks, on any accelerator."""

__version__ = "0.1.0"
