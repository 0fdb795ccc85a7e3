"""Register every check in ``torchhal_conformance._check.CHECKS``: one module for each topic of a contract."""

from importlib import import_module
from typing import Final

from torchhal_conformance._check import sort_checks

_MODULES: Final = (
    "plugin_discovery",
    "plugin_vendor_modules",
    "plugin_components",
    "plugin_distribution",
    "accelerator_devices",
    "accelerator_tensors",
    "accelerator_state",
    "precision_dtypes",
    "precision_gradients",
    "precision_steps",
    "precision_state",
    "checkpoint_contents",
    "checkpoint_paths",
    "checkpoint_durability",
    "checkpoint_async",
    "checkpoint_ranks",
    "cluster_environment",
    "cluster_launch",
    "strategy_collectives",
    "strategy_lifecycle",
    "strategy_components",
    "strategy_training",
    "strategy_checkpoints",
    "strategy_rank_state",
    "processes",
    "trainer",
)

for _module in _MODULES:
    import_module(f"{__name__}.{_module}")
sort_checks()
