"""Check the options of the booster's plugins, without importing Colossal-AI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torchhal.errors import ConfigurationError
from torchhal.suggestions import did_you_mean, one_of

_PRECISION: Final = "the Trainer's precision decides in which dtypes a model is trained: Trainer(precision=...)"
_CLIP: Final = "the Trainer clips, by the norm of all ranks' gradients: Trainer(gradient_clip_val=...)"
_FP8: Final = "it rounds what is sent to 8 bits in kernels for CUDA, and has no tolerance to be tested with"
_STREAMS: Final = "the ranks compare which parameters have gradients before they send any, so there is no overlap"
_SCALER: Final = dict.fromkeys(
    ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "max_scale"),
    _PRECISION,
)
_ZERO: Final = {
    **_SCALER, "precision": _PRECISION, "master_weights": _PRECISION, "cast_inputs": _PRECISION, "max_norm": _CLIP,
    "norm_type": _CLIP, "use_fp8": _FP8, "fp8_communication": _FP8, "overlap_communication": _STREAMS,
    "overlap_allgather": _STREAMS, "cpu_offload": "it keeps float32 copies of the weights, whatever the precision is",
    "communication_dtype": "it rounds gradients, and has no tolerance to be tested with",
    "extra_dp_size": "every rank has a share of the optimizer's state here",
}  # fmt: skip

CARRIED: Final[Mapping[str, Mapping[str, Any]]] = {
    "torch_ddp": {
        "broadcast_buffers": True, "bucket_cap_mb": 25, "find_unused_parameters": False, "check_reduction": False,
        "gradient_as_bucket_view": False, "static_graph": False,
    },
    "low_level_zero": {"stage": 1, "reduce_bucket_size_in_m": 12, "verbose": False},
}  # fmt: skip
"""The options of each plugin that are handed on, with Colossal-AI's defaults."""

REFUSED: Final[Mapping[str, Mapping[str, str]]] = {
    "torch_ddp": {"fp8_communication": _FP8},
    "low_level_zero": _ZERO,
}
"""The options of each plugin that Colossal-AI has and that aren't handed on, with the reason."""

NAMED: Final[Mapping[str, tuple[str, ...]]] = {
    "gemini": (
        "chunk_config_dict", "chunk_init_device", "placement_policy", "enable_gradient_accumulation", "max_prefetch",
        "shard_param_frac", "offload_optim_frac", "offload_param_frac", "warmup_non_model_data_ratio",
        "steady_cuda_cap_ratio", "precision", "master_weights", "pin_memory", "force_outputs_fp32", "strict_ddp_mode",
        "search_range_m", "hidden_dim", "min_chunk_size_m", "memstats", "gpu_margin_mem_ratio", *_SCALER, "max_norm",
        "norm_type", "tp_size", "extra_dp_size", "enable_all_optimization", "enable_fused_normalization",
        "enable_flash_attention", "enable_sequence_parallelism", "enable_jit_fused", "enable_async_reduce", "use_fp8",
        "verbose", "fp8_communication",
    ),
    "hybrid_parallel": (
        "tp_size", "pp_size", "sp_size", "precision", "zero_stage", "enable_all_optimization",
        "enable_fused_normalization", "enable_flash_attention", "enable_jit_fused", "enable_sequence_parallelism",
        "sequence_parallelism_mode", "parallel_output", "num_microbatches", "microbatch_size", *_SCALER, "max_norm",
        "broadcast_buffers", "ddp_bucket_cap_mb", "find_unused_parameters", "check_reduction",
        "gradient_as_bucket_view", "static_graph", "zero_bucket_size_in_m", "cpu_offload", "communication_dtype",
        "overlap_communication", "custom_policy", "pp_style", "num_model_chunks", "scheduler_nodes",
        "num_layers_per_stage", "gradient_checkpoint_config", "enable_metadata_cache", "make_vocab_size_divisible_by",
        "dp_outside", "overlap_p2p", "overlap_allgather", "fp8_communication", "use_fp8", "inner_ring_size",
    ),
}  # fmt: skip
"""The options of plugins that are refused before launch, of which the names alone are checked."""

CLASSES: Final = {
    "torch_ddp": "TorchDDPPlugin",
    "low_level_zero": "LowLevelZeroPlugin",
    "gemini": "GeminiPlugin",
    "hybrid_parallel": "HybridParallelPlugin",
}
"""Plugin -> its class in ``colossalai.booster.plugin``."""

_STAGES: Final = (1, 2)


def check_plugin(plugin: Any) -> str:
    """Return ``plugin``, the name of one of the booster's plugins.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(plugin, str) or plugin not in CLASSES:
        meant = did_you_mean(plugin, CLASSES) if isinstance(plugin, str) else ""
        raise ConfigurationError(f"'plugin' must be {one_of(CLASSES)} (got {plugin!r}){meant}")
    return plugin


def check_options(plugin: str, options: Any) -> dict[str, Any]:
    """Return the options of a plugin, as a dict of their own.

    Raises:
        ConfigurationError: one that the plugin doesn't have, or that isn't handed on; a value that can't be.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"'options' must be a dict of arguments of {CLASSES[plugin]} (got {options!r})")
    refused, carried = REFUSED.get(plugin, {}), CARRIED.get(plugin, {})
    known = tuple(carried) or NAMED[plugin]
    for name, value in options.items():
        if name in refused:
            raise ConfigurationError(f"option {name!r} of {CLASSES[plugin]} isn't handed on: {refused[name]}")
        if name not in known:
            meant = did_you_mean(str(name), known)
            raise ConfigurationError(f"{CLASSES[plugin]} has no option {name!r}: it takes {one_of(known)}{meant}")
        if name in carried:
            _check_value(f"option {name!r} of {CLASSES[plugin]}", value, carried[name])
    if options.get("stage", 1) not in _STAGES:
        raise ConfigurationError(f"option 'stage' of {CLASSES[plugin]} must be 1 or 2 (got {options['stage']!r})")
    return dict(options)


def _check_value(what: str, value: Any, default: Any) -> None:
    """Raise ConfigurationError for a value of another kind than the default."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigurationError(f"{what} must be a bool (got {value!r})")
    elif isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigurationError(f"{what} must be a positive number (got {value!r})")
