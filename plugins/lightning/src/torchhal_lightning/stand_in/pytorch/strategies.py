"""Lightning's strategies, as names for torchhal's with their options."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch

from torchhal.errors import ConfigurationError
from torchhal_lightning.stand_in._missing import missing

_TIMEOUT = timedelta(minutes=30)


class Strategy:
    """Names a strategy. For another one, subclass torchhal.strategies.Strategy.

    Args:
        accelerator: an accelerator or its alias.
        checkpoint_io: as in ``Trainer(plugins=...)``.
        precision_plugin: the same.
    """

    strategy_name: ClassVar[str] = ""

    def __init__(self, accelerator: Any = None, checkpoint_io: Any = None, precision_plugin: Any = None) -> None:
        self._accelerator = accelerator
        self._checkpoint_io = checkpoint_io
        self._precision_plugin = precision_plugin


class ParallelStrategy(Strategy):
    """Names a strategy of several processes.

    Args:
        accelerator: as of Strategy.
        parallel_devices: of this node.
        cluster_environment: as in ``Trainer(plugins=...)``.
        checkpoint_io: as of Strategy.
        precision_plugin: the same.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self._parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self._process_group_backend: str | None = None
        self._timeout: timedelta | None = None
        self._start_method = "popen"


class DDPStrategy(ParallelStrategy):
    """torchhal's ``ddp``; further arguments are those of DistributedDataParallel."""

    strategy_name = "ddp"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: Any = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        start_method: str = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._ddp_comm_state = ddp_comm_state
        self._ddp_comm_hook = ddp_comm_hook
        self._ddp_comm_wrapper = ddp_comm_wrapper
        self._model_averaging_period = model_averaging_period
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._ddp_kwargs = kwargs


class FSDPStrategy(ParallelStrategy):
    """torchhal's ``zero3`` or ``zero2``; further arguments are those of FullyShardedDataParallel."""

    strategy_name = "fsdp"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: str = "full",
        device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        from torch.distributed.fsdp import CPUOffload, ShardingStrategy

        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            raise ConfigurationError("pass one of 'activation_checkpointing' and 'activation_checkpointing_policy'")
        if state_dict_type not in ("full", "sharded"):
            raise ConfigurationError(f"'state_dict_type' must be 'full' or 'sharded' (got {state_dict_type!r})")
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self.cpu_offload = CPUOffload(cpu_offload) if isinstance(cpu_offload, bool) else cpu_offload
        self.mixed_precision = mixed_precision
        policy = activation_checkpointing_policy or activation_checkpointing
        policy = {policy} if isinstance(policy, type) else policy
        self._activation_checkpointing_kwargs = {"auto_wrap_policy": policy} if policy else {}
        self.sharding_strategy = (
            ShardingStrategy[sharding_strategy.upper()] if isinstance(sharding_strategy, str) else sharding_strategy
        )
        self._state_dict_type = state_dict_type
        given = {"auto_wrap_policy": auto_wrap_policy, "device_mesh": device_mesh}
        self.kwargs = {**kwargs, **{name: value for name, value in given.items() if value is not None}}


class DeepSpeedStrategy(ParallelStrategy):
    """torchhal's ``deepspeed``, for a configuration of DeepSpeed's or a stage.

    Args:
        accelerator: as of Strategy.
        zero_optimization: whether ``stage`` counts.
        stage: of ZeRO.
        offload_optimizer: keep the optimizer's state on the host.
        offload_parameters: keep the parameters there.
        config: DeepSpeed's configuration, or the path of one; the others don't count then.
        parallel_devices: of this node.
        cluster_environment: as in ``Trainer(plugins=...)``.
        precision_plugin: the same.
        process_group_backend: of torch.distributed.
        timeout: of collectives.
        options: others of Lightning's, which are refused: they go into ``config``.
    """

    strategy_name = "deepspeed"

    def __init__(
        self,
        accelerator: Any = None,
        zero_optimization: bool = True,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, None, precision_plugin)
        if options:
            raise ConfigurationError(
                f"DeepSpeedStrategy's {', '.join(map(repr, sorted(options)))} have no arguments here: write them into "
                "DeepSpeed's own configuration, DeepSpeedStrategy(config={...})"
            )
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        if config is None and zero_optimization:
            zero: dict[str, Any] = {"stage": stage}
            if offload_optimizer:
                zero["offload_optimizer"] = {"device": "cpu"}
            if offload_parameters:
                zero["offload_param"] = {"device": "cpu"}
            config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
        self.config = config


class SingleDeviceStrategy(Strategy):
    """torchhal's ``single_device``."""

    strategy_name = "single_device"

    def __init__(
        self, device: Any = "cpu", accelerator: Any = None, checkpoint_io: Any = None, precision_plugin: Any = None
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self._root_device = torch.device(device)


class SingleDeviceXLAStrategy(SingleDeviceStrategy):
    """torchhal's ``single_xla``."""

    strategy_name = "single_xla"


class XLAStrategy(DDPStrategy):
    """torchhal's ``xla``."""

    strategy_name = "xla"


class _StrategyRegistry(dict[str, dict[str, Any]]):
    """Strategies by name, which scripts add to."""

    def register(
        self,
        name: str,
        strategy: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Add a strategy; without ``strategy`` this is a decorator.

        Raises:
            ConfigurationError: there is one of that name.
        """
        if not isinstance(name, str):
            raise TypeError(f"'name' must be a str (got {name!r})")
        if name in self and not override:
            raise ConfigurationError(f"strategy {name!r} is registered already: pass override=True to replace it")

        def add(strategy: Callable[..., Any]) -> Callable[..., Any]:
            self[name] = {"strategy": strategy, "description": description, "init_params": init_params}
            return strategy

        return add if strategy is None else add(strategy)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a new strategy of that name."""
        if name not in self:
            if default is None:
                raise KeyError(f"{name!r} is no registered strategy: there are {', '.join(self) or 'none'}")
            return default
        return self[name]["strategy"](**self[name]["init_params"])

    def remove(self, name: str) -> None:
        """Remove one."""
        self.pop(name)

    def available_strategies(self) -> list[str]:
        """Return the names."""
        return sorted(self)


StrategyRegistry = _StrategyRegistry()

ModelParallelStrategy = missing(
    "ModelParallelStrategy", "torchhal's strategies 'tensor_parallel' and 'hybrid' split a model: `torchhal plugins`."
)
