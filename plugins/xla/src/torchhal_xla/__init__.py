"""TPUs and other XLA devices for torchhal. The manifest is ``torchhal_xla._plugin``."""
