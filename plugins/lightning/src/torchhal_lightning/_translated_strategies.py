"""Translate the options of Lightning's strategies into those of torchhal's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn

from torchhal.errors import ConfigurationError

_Translated = tuple[str, dict[str, Any], list[Any]]
"""Alias, options, and what goes into ``plugins``."""

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_ONLY_SPEED = frozenset({
    "backward_prefetch", "device_mesh", "forward_prefetch", "limit_all_gathers", "sync_module_states",
    "use_orig_params",
})  # fmt: skip
"""FullyShardedDataParallel's arguments without an effect on the result, which fully_shard doesn't have."""


def _processes(strategy: Any) -> dict[str, Any]:
    """Return the options that all strategies of several processes have."""
    options: dict[str, Any] = {}
    start = getattr(strategy, "_start_method", "popen")
    if start != "popen":
        options["start_method"] = start
    if (backend := getattr(strategy, "_process_group_backend", None)) is not None:
        options["process_group_backend"] = backend
    if (timeout := getattr(strategy, "_timeout", None)) not in (None, _DEFAULT_TIMEOUT):
        options["timeout"] = timeout
    return options


def _ddp(strategy: Any) -> _Translated:
    if strategy._model_averaging_period is not None:
        raise ConfigurationError(
            "DDPStrategy(model_averaging_period=...) has no counterpart here: torch's post_localSGD hook, "
            "DDPStrategy(ddp_comm_hook=..., ddp_comm_state=...), averages gradients locally, and hivemind weights"
        )
    options = {**_processes(strategy), **strategy._ddp_kwargs}
    if (hook := strategy._ddp_comm_hook) is not None:
        wrapper = strategy._ddp_comm_wrapper
        options["comm_hook"] = hook if wrapper is None else wrapper(hook)
        options["comm_state"] = strategy._ddp_comm_state
    return "ddp", options, []


def _fsdp(strategy: Any) -> _Translated:
    options = _processes(strategy)
    plugins: list[Any] = []
    kwargs = dict(strategy.kwargs)
    sharding = strategy.sharding_strategy.name
    aliases = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2"}
    if sharding == "NO_SHARD":
        return "ddp", options, plugins
    if sharding not in aliases:
        raise ConfigurationError(
            f"FSDPStrategy(sharding_strategy={sharding!r}) is torchhal's 'hybrid' with the sizes of both axes: "
            "strategy={'hybrid': {'data': REPLICAS, 'shard': PARTS}}"
        )
    if (policy := kwargs.pop("auto_wrap_policy", None)) is not None:
        options["wrap_policy"] = _chooser(policy)
    else:
        options["wrap_policy"] = "none"
    if checkpointing := strategy._activation_checkpointing_kwargs:
        options["activation_checkpointing"] = _chooser(
            checkpointing.get("auto_wrap_policy") or checkpointing["check_fn"]
        )
    if strategy.cpu_offload is not None and strategy.cpu_offload.offload_params:
        options["cpu_offload"] = True
    if strategy.mixed_precision is not None:
        options["mixed_precision"] = _mixed(strategy.mixed_precision)
    if strategy._state_dict_type == "sharded":
        plugins.append("dcp")
    if unknown := sorted(kwargs.keys() - _ONLY_SPEED):
        raise ConfigurationError(
            f"FSDPStrategy's {', '.join(map(repr, unknown))} can't be given to torchhal's {aliases[sharding]!r}, which "
            "has no such option"
        )
    return aliases[sharding], options, plugins


def _mixed(policy: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)


class _Chooses:
    """A wrap policy of torch's as a function of a name and a module."""

    def __init__(self, policy: Callable[..., bool]) -> None:
        self.policy = policy

    def __call__(self, name: str, module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return self.policy(module=module, recurse=False, nonwrapped_numel=size)


def _chooser(policy: Any) -> Any:
    """Return one of torch's policies in a form that torchhal's strategies take."""
    if isinstance(policy, set | frozenset | list | tuple):
        return list(policy)
    if (classes := getattr(policy, "_module_classes", None)) is not None:  # ModuleWrapPolicy
        return list(classes)
    if isinstance(policy, partial):
        if "transformer_layer_cls" in policy.keywords:
            return list(policy.keywords["transformer_layer_cls"])
        if "min_num_params" in policy.keywords:
            return int(policy.keywords["min_num_params"])
    return _Chooses(policy)


def _deepspeed(strategy: Any) -> _Translated:
    options = _processes(strategy)
    if strategy.config is not None:
        options["config"] = strategy.config
    return "deepspeed", options, []


def _named(alias: str) -> Callable[[Any], _Translated]:
    return lambda strategy: (alias, {}, [])


STRATEGIES: dict[str, Callable[[Any], _Translated]] = {
    "DDPStrategy": _ddp,
    "FSDPStrategy": _fsdp,
    "DeepSpeedStrategy": _deepspeed,
    "SingleDeviceStrategy": _named("single_device"),
    "SingleDeviceXLAStrategy": _named("single_xla"),
    "XLAStrategy": _named("xla"),
}
"""Lightning's class -> its alias and options here."""
