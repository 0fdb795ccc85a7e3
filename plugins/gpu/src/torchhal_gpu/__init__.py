"""GPUs for torchhal: accelerators ``gpu`` (``cuda``), ``xpu`` and ``mps``, and the precision ``tf32``."""

__version__ = "0.1.0"
