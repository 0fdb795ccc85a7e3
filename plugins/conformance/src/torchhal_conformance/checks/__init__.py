"""Register every check in ``torchhal_conformance._check.CHECKS``: one module for each topic of a contract."""

from importlib import import_module
from typing import Final

from torchhal_conformance._check import sort_checks

_MODULES: Final = (
    "plugin_discovery",
    "plugin_declarations",
    "plugin_vendor_modules",
    "plugin_components",
    "plugin_distribution",
    "plugin_diagnostics",
    "plugin_refusals",
    "accelerator_devices",
    "accelerator_tensors",
    "accelerator_state",
    "accelerator_statistics",
    "accelerator_loaders",
    "accelerator_generators",
    "accelerator_failures",
    "precision_dtypes",
    "precision_needs",
    "precision_gradients",
    "precision_steps",
    "precision_sequences",
    "precision_interruptions",
    "precision_surroundings",
    "precision_state",
    "checkpoint_contents",
    "checkpoint_paths",
    "checkpoint_durability",
    "checkpoint_recognition",
    "checkpoint_async",
    "checkpoint_ranks",
    "checkpoint_reading",
    "checkpoint_links",
    "checkpoint_values",
    "checkpoint_urls",
    "checkpoint_writes",
    "cluster_environment",
    "cluster_variables",
    "cluster_launch",
    "cluster_numbers",
    "cluster_sizes",
    "cluster_worlds",
    "cluster_surroundings",
    "strategy_collectives",
    "strategy_lifecycle",
    "strategy_components",
    "strategy_training",
    "strategy_checkpoints",
    "strategy_sequences",
    "strategy_optimizers",
    "strategy_changes",
    "strategy_rank_state",
    "processes",
    "trainer",
    "strategy_hooks",
)

for _module in _MODULES:
    import_module(f"{__name__}.{_module}")
sort_checks()
