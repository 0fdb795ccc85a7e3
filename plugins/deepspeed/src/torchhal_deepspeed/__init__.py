"""DeepSpeed's engine as strategies of torchhal, and its checkpoints."""

__version__ = "0.1.0"
