"""Make the profiler of the Trainer's argument."""

from __future__ import annotations

from typing import Any

from torchhal.errors import ConfigurationError
from torchhal.suggestions import did_you_mean
from torchhal.trainer.profilers.base import PassThroughProfiler, Profiler
from torchhal.trainer.profilers.simple import SimpleProfiler
from torchhal.trainer.profilers.torch_profiler import TorchProfiler

_WORDS: dict[str, type[Profiler]] = {"simple": SimpleProfiler, "torch": TorchProfiler}


def check_profiler(name: str, value: Any) -> Profiler:
    """Return the profiler of ``Trainer(profiler=...)``: None, one of the words, or an object.

    Raises:
        ConfigurationError: anything else.
    """
    if value is None:
        return PassThroughProfiler()
    if isinstance(value, Profiler):
        return value
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]()
    advice = ""
    if isinstance(value, str):
        advice = did_you_mean(value, _WORDS)
    elif isinstance(value, type) and issubclass(value, Profiler):
        advice = f": make an object, {value.__name__}()"
    words = ", ".join(map(repr, _WORDS))
    raise ConfigurationError(
        f"'{name}' must be None, {words} or an object of a subclass of torchhal.trainer.profilers.Profiler "
        f"(got {value!r}){advice}"
    )
