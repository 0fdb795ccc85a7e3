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
    "gemini": {},
    "hybrid_parallel": {},
}  # fmt: skip
"""The options of each plugin that are handed on, with Colossal-AI's defaults."""

REFUSED: Final[Mapping[str, Mapping[str, str]]] = {
    "torch_ddp": {"fp8_communication": _FP8},
    "low_level_zero": _ZERO,
    "gemini": {},
    "hybrid_parallel": {},
}
"""The options of each plugin that Colossal-AI has and that aren't handed on, with the reason."""

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
    for name, value in options.items():
        if name in REFUSED[plugin]:
            raise ConfigurationError(f"option {name!r} of {CLASSES[plugin]} isn't handed on: {REFUSED[plugin][name]}")
        if name not in CARRIED[plugin]:
            known = CARRIED[plugin]
            raise ConfigurationError(
                f"{CLASSES[plugin]} has no option {name!r}: {one_of(known)} can be given{did_you_mean(str(name), known)}"
            )
        default = CARRIED[plugin][name]
        if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, int | float):
            kind = "a bool" if isinstance(default, bool) else "a number"
            raise ConfigurationError(f"option {name!r} of {CLASSES[plugin]} must be {kind} (got {value!r})")
        if name == "stage" and value not in _STAGES:
            raise ConfigurationError(f"option 'stage' of {CLASSES[plugin]} must be 1 or 2 (got {value!r})")
        if not isinstance(default, bool) and value <= 0:
            raise ConfigurationError(f"option {name!r} of {CLASSES[plugin]} must be positive (got {value!r})")
    return dict(options)
