"""Choose the format of an export, and check that the packages it needs are there."""

from __future__ import annotations

import importlib
from typing import Final

from torchhal.errors import ConfigurationError
from torchhal.suggestions import did_you_mean, one_of

ENDINGS: Final = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
"""Format -> the end of a file's name by which it is chosen."""

PACKAGES: Final = {"safetensors": ("safetensors",), "torch_export": (), "onnx": ("onnx", "onnxscript")}
"""Format -> what it needs beside torch."""


def check_format(format: str | None, output: str) -> str:
    """Return the format that is requested, or that the end of ``output`` names."""
    if format is None:
        found = next((name for name, ending in ENDINGS.items() if output.endswith(ending)), None)
        if found is None:
            raise ConfigurationError(
                f"'output' must end in {one_of(ENDINGS.values())} where 'format' is not given (got {output!r})"
            )
        return found
    if format not in ENDINGS:
        near = did_you_mean(format, ENDINGS) if isinstance(format, str) else ""
        raise ConfigurationError(f"'format' must be {one_of(ENDINGS)} (got {format!r}){near}")
    return format


def require_packages(format: str) -> None:
    """Raise ConfigurationError for a package that can't be imported."""
    for name in PACKAGES[format]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"format {format!r} needs {' and '.join(PACKAGES[format])}, and {name} can't be imported ({error}): "
                "pip install torchhal[export]"
            ) from error
