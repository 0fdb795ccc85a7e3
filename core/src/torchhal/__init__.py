"""The hardware layer for PyTorch training: write a model once, train it on any accelerator, by plugin.

``import torchhal`` imports neither torch nor a plugin: a public name is imported when it is first accessed.
Type checkers and completion read ``__init__.pyi``.
"""

from __future__ import annotations

import sys

__version__ = "0.2.0"

__all__ = [
    "Availability",
    "BackboneFinetuning",
    "BaseFinetuning",
    "Callback",
    "Component",
    "DataModule",
    "DeviceStats",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "Module",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "RichProgress",
    "RichSummary",
    "Run",
    "StochasticWeightAveraging",
    "Timer",
    "Trainer",
    "TrainerCLI",
    "WeightAveraging",
    "__version__",
    "hookimpl",
    "plugins",
    "register",
    "seed_everything",
]

_MODULES = {
    "Availability": "plugin",
    "BackboneFinetuning": "trainer.callbacks",
    "BaseFinetuning": "trainer.callbacks",
    "Callback": "trainer.callbacks",
    "Component": "plugin",
    "DataModule": "module",
    "DeviceStats": "trainer.callbacks",
    "EMAWeightAveraging": "trainer.callbacks",
    "EarlyStopping": "trainer.callbacks",
    "GradientAccumulationScheduler": "trainer.callbacks",
    "LambdaCallback": "trainer.callbacks",
    "LearningRateMonitor": "trainer.callbacks",
    "ModelCheckpoint": "trainer.callbacks",
    "Module": "module",
    "OnExceptionCheckpoint": "trainer.callbacks",
    "PredictionWriter": "trainer.callbacks",
    "ProgressBar": "trainer.callbacks",
    "RichProgress": "trainer.callbacks",
    "RichSummary": "trainer.callbacks",
    "Run": "run",
    "StochasticWeightAveraging": "trainer.callbacks",
    "Timer": "trainer.callbacks",
    "Trainer": "trainer",
    "TrainerCLI": "trainer_cli",
    "WeightAveraging": "trainer.callbacks",
    "hookimpl": "plugin",
    "plugins": "registry",
    "register": "registry",
    "seed_everything": "rng",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        # torchhal.registry and its like work without an import of their own.
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    message = f"module {__name__!r} has no attribute {name!r}"
    if not name.startswith("_"):
        from torchhal.registry._hints import NAMES
        from torchhal.suggestions import did_you_mean

        message += f": there is {NAMES[name]}" if name in NAMES else did_you_mean(name, __all__)
        # ``from torchhal import name`` drops an AttributeError, and the advice with it
        if name in NAMES and sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(message, name=__name__)
    raise AttributeError(message)


def __dir__() -> list[str]:
    """Return the public names, imported or not, for completion and ``dir()``."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
