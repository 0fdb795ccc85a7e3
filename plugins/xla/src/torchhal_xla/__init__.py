"""TPUs and other XLA devices for torchhal. The manifest is ``torchhal_xla._plugin``."""

__version__ = "0.1.0"
