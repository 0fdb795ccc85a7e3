"""poptorch's options: each setter checks its type and gives the options back; frozen once a model uses them."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import torch

from poptorch import enums


class _Values:
    """Values by name, of the types that they had at first."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_values"] = values
        self.__dict__["_is_frozen"] = False

    def set(self, **values: Any) -> None:
        self._check_frozen()
        for name, value in values.items():
            assert name in self._values, f"there is no option {name!r}, only {list(self._values)}"
            kind = type(self._values[name])
            assert isinstance(value, kind), f"{name!r} must be of type {kind.__name__} (got {value!r})"
            self._values[name] = value

    def createOrSet(self, **values: Any) -> None:
        self._check_frozen()
        for name, value in values.items():
            if name in self._values:
                self.set(**{name: value})
            else:
                self._values[name] = value

    def exists(self, option: str) -> bool:
        return option in self._values

    def _check_frozen(self) -> None:
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"there is no option {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_frozen()
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self.set(**{name: value})

    def __deepcopy__(self, memo: dict[int, Any]) -> _Values:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        made.__dict__["_is_frozen"] = False
        return made


class _PopartOptions:
    def __init__(self) -> None:
        self._is_frozen = False
        self.options: dict[str, Any] = {"instrumentWithHardwareCycleCounter": False, "rearrangeAnchorsOnHost": False}

    def set(self, key: str, value: Any) -> _PopartOptions:
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> _PopartOptions:
        return self.set("engineOptions", engine_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> _PopartOptions:
        made = _PopartOptions()
        made.options = copy.deepcopy(self.options, memo)
        return made


class _PrecisionOptions(_Values):
    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__()
        self.__dict__["_popart_options"] = popart_options

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        if not isinstance(value, bool):
            raise ValueError(f"'value' must be a bool (got {value!r})")
        self.createOrSet(running_statistics_always_float=value)
        return self

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        if dtype not in (torch.float, torch.half):
            raise ValueError(f"'dtype' must be torch.float or torch.half (got {dtype!r})")
        self.createOrSet(partials_type=dtype)
        return self


class _TrainingOptions(_Values):
    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )
        self.__dict__["_popart_options"] = popart_options

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type: enums.ReductionType) -> _TrainingOptions:
        if not isinstance(reduction_type, enums.ReductionType) or reduction_type is enums.ReductionType.NoReduction:
            raise ValueError(
                f"'reduction_type' must be ReductionType.Mean or ReductionType.Sum (got {reduction_type!r})"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self


class _DistributedOptions(_Values):
    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0)
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        return self.configureProcessId(
            int(os.environ.get(var_process_id, "0")), int(os.environ.get(var_num_processes, "1"))
        )

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        return int(self.num_distributed_processes)


class PipelinedExecution:
    """Stages on several IPUs work on different micro-batches at the same time."""

    def __init__(self, *args: Any) -> None:
        self.stages = args


class ShardedExecution(PipelinedExecution):
    """One stage after the other."""


class Options(_Values):
    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_cgt=enums.CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=enums.OutputMode.Default.value,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always.value,
            sync_pattern=enums.SyncPattern.Full.value,
            available_memory_proportion={},
        )
        popart = _PopartOptions()
        self.__dict__.update(
            _popart=popart,
            _precision=_PrecisionOptions(popart),
            _training=_TrainingOptions(popart),
            _distributed=_DistributedOptions(),
            _execution_strategy=PipelinedExecution(),
        )
        if path := os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(path)
        for name, value in json.loads(os.environ.get("POPTORCH_DEFAULT_OPTIONS", "{}")).items():
            setter = self
            for attribute in name.split("."):
                setter = getattr(setter, attribute)
            setter(*value) if isinstance(value, list) else setter(value)  # type: ignore[operator]

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True
        for part in (self._precision, self._training, self._distributed):
            part.__dict__["_is_frozen"] = True
        self._popart._is_frozen = True

    @property
    def Distributed(self) -> _DistributedOptions:
        return self._distributed  # type: ignore[no-any-return]

    @property
    def Precision(self) -> _PrecisionOptions:
        return self._precision  # type: ignore[no-any-return]

    @property
    def Training(self) -> _TrainingOptions:
        return self._training  # type: ignore[no-any-return]

    @property
    def _Popart(self) -> _PopartOptions:
        return self._popart  # type: ignore[no-any-return]

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def deviceIterations(self, device_iterations: int) -> Options:
        self.set(device_iterations=device_iterations)
        return self

    def setExecutionStrategy(self, strategy: PipelinedExecution) -> Options:
        assert isinstance(strategy, PipelinedExecution)
        self._check_frozen()
        self.__dict__["_execution_strategy"] = strategy
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Options:
        assert all(key.startswith("IPU") for key in available_memory_proportion)
        self.set(
            available_memory_proportion={int(key[3:]): value for key, value in available_memory_proportion.items()}
        )
        return self

    def replicationFactor(self, replication_factor: int) -> Options:
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: enums.CommGroupType) -> Options:
        if input_group_type is enums.CommGroupType.All:
            raise ValueError("'input_group_type' must not be All")
        if self.replication_factor % input_group_size:
            raise ValueError(f"'input_group_size' must divide {self.replication_factor} (got {input_group_size})")
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    def logDir(self, log_dir: str) -> Options:
        self.set(log_dir=log_dir)
        return self

    def modelName(self, name: str) -> Options:
        self.createOrSet(model_name=name)
        return self

    def enableExecutableCaching(self, path: str) -> Options:
        self._Popart.set("enableEngineCaching", path is not None)
        if path is not None:
            self._Popart.set("cachePath", path)
        return self

    def useIpuModel(self, use_model: bool) -> Options:
        self.createOrSet(use_model=use_model)
        return self

    def connectionType(self, connection_type: enums.ConnectionType) -> Options:
        assert isinstance(connection_type, enums.ConnectionType)
        self.set(connection_type=connection_type.value)
        return self

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> Options:
        assert isinstance(sync_pattern, enums.SyncPattern)
        self.set(sync_pattern=sync_pattern.value)
        return self

    def useIpuId(self, ipu_id: int) -> Options:
        assert isinstance(ipu_id, int)
        self.createOrSet(ipu_id=ipu_id)
        return self

    def outputMode(self, output_mode: enums.OutputMode, output_return_period: int | None = None) -> Options:
        assert isinstance(output_mode, enums.OutputMode)
        if output_mode is enums.OutputMode.EveryN:
            assert output_return_period and output_return_period > 0, (
                "'output_return_period' must be a positive int for EveryN"
            )
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    def defaultOutputMode(self) -> bool:
        return bool(self.output_mode == enums.OutputMode.Default)

    def randomSeed(self, random_seed: int) -> Options:
        assert isinstance(random_seed, int)
        torch.manual_seed(random_seed)
        self.createOrSet(random_seed=random_seed)
        return self

    def enableProfiling(self, profile_dir: str | None = None) -> Options:
        engine = self._Popart.options.get("engineOptions", {})
        engine.update(
            {
                "debug.allowOutOfMemory": "true",
                "autoReport.directory": profile_dir or ".",
                "autoReport.all": "true",
            }
        )
        self._Popart.setEngineOptions(engine)
        return self

    def clone(self) -> Options:
        return copy.deepcopy(self)
