"""Start DeepSpeed's engine around a module and its optimizer, and give both back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.composition import Composition
from torchhal.distributed import collectives
from torchhal.distributed.stores import Store
from torchhal.errors import ConfigurationError, ModelError
from torchhal.precision import Precision
from torchhal.strategies import ParallelStrategy, check_frequencies, check_lookups, overrides
from torchhal_deepspeed import _compatibility as compatibility
from torchhal_deepspeed import _config as settings
from torchhal_deepspeed import _sdk as sdk
from torchhal_deepspeed._activation_checkpointing import recompute
from torchhal_deepspeed._engine_state import EngineState
from torchhal_deepspeed._module_restore import ModuleSnapshot, divide_anew
from torchhal_deepspeed._partition_map import PartitionMap
from torchhal_deepspeed._step_module import StepModule

_DIVIDED: Final = "_torchhal_in_parts"
"""Attribute of a module whose parameters an engine has divided at stage 3, until they are whole again."""


class DeepSpeedEngineBase(ParallelStrategy):
    """The life cycle of an engine: its configuration, how it starts and how it ends.

    What a step does with it, and what a checkpoint takes from it, are the subclass's.
    """

    config: dict[str, Any]
    """The DeepSpeed configuration, before :meth:`engine_config` completes it."""
    activation_checkpointing: Any
    logging_level: int

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.engine: Any = None
        """DeepSpeed's engine, between the set-up and the tear-down."""
        self.state: EngineState | None = None
        """Reads and writes what the engine holds."""
        self._deepspeed: Any = None
        self._wrapping: ModuleSnapshot | None = None
        self._left: dict[str, Any] = {}
        self._trained: frozenset[str] = frozenset()
        self._parameters: list[torch.nn.Parameter] = []
        self._were_trained: list[bool] = []
        """True for those of the parameters that were trained when the engine began."""
        self._compared = True
        self._recomputing: Callable[[], None] | None = None
        self._life = ExitStack()

    @property
    def stage(self) -> int:
        """The stage of ZeRO, 0 to 3."""
        stage: int = self.config[settings.ZERO]["stage"]
        return stage

    def configure(self, **parts: Any) -> None:
        super().configure(**parts)
        self._deepspeed = self._load(self.root_device.type)

    def _load(self, device_type: str) -> Any:
        deepspeed = sdk.load(device_type)
        sdk.set_log_level(self.logging_level)
        return deepspeed

    def check_fit(self, composition: Composition) -> None:
        self._load(composition.accelerator.device_type)
        settings.check_with_deepspeed(self.config)
        settings.check_precision(self.config, composition.precision)

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_communication(self) -> Store | None:
        store = super().setup_communication()
        self._deepspeed = self._load(self.root_device.type)
        self._life.enter_context(sdk.ranks_in_environment(self.global_rank, self.local_rank, self.world_size))
        self._life.enter_context(sdk.communication(self._deepspeed))
        return store

    def init_context(self) -> AbstractContextManager[Any]:
        """Return a context that at stage 3 builds under ``zero.Init``: no rank ever holds all parameters whole."""
        context = super().init_context()
        if self.stage < 3 or not self.is_set_up:
            return context
        return self._divided_init(context)

    def parameter_shape(self, parameter: nn.Parameter) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    @contextmanager
    def _divided_init(self, context: AbstractContextManager[Any]) -> Any:
        # the dtype is in the configuration: given by itself, it counts on some devices only
        with context, self._deepspeed.zero.Init(config_dict_or_path=self.engine_config()):
            yield

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the weights that compute."""
        return torch.float32 if settings.mixed_section(self.precision) is None else self.precision.compute_dtype

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration, completed by the Trainer's arguments, as the engine gets it."""
        return settings.complete(
            self.config,
            precision=self.precision,
            accumulate=self.accumulate_grad_batches,
            clip_val=self.gradient_clip_val,
            clip_algorithm=self.gradient_clip_algorithm,
            world_size=self.world_size,
            device_type=self.root_device.type,
        )

    def setup(self, trainer: Any) -> None:
        training = trainer.state.fn == "fit"
        self.setup_model(training=training)
        if training:
            self.setup_optimizers(*self._configured_optimizers(trainer))

    def _configured_optimizers(self, trainer: Any) -> tuple[Sequence[Optimizer], Sequence[Any]]:
        if "optimizer" not in self.config:
            optimizers, configs = trainer.configure_optimizers()
            return optimizers, configs
        own = getattr(self.module, "configure_optimizers", None)
        if own is not None and own() is not None:
            raise ConfigurationError(
                f"{type(self.module).__name__}.configure_optimizers returns an optimizer, and the DeepSpeed "
                "configuration has one: leave 'optimizer' out, or return None"
            )
        return [], []

    def setup_model(self, *, training: bool = True) -> None:
        assert self.module is not None, "connect() comes first"
        config = self.engine_config()  # raises what contradicts the Trainer before anything is moved
        if getattr(self.module, _DIVIDED, False):
            raise ModelError(
                f"an earlier run that failed has left {type(self.module).__name__} in parts: build a new one, and "
                "continue from a checkpoint"
            )
        if self._is_divided():
            with self.guard("division of a model that an earlier run has built"):
                divide_anew(self.module, self._deepspeed.zero.Init(config_dict_or_path=config))
        if training and (self.stage >= 1 or self.world_size > 1):  # the engine steps a copy of the weights
            check_lookups(self.module, "each rank would look up, and scale, other rows, or those of a copy")
        if training and self.world_size > 1:
            check_frequencies(self.module, "each rank")
        if self.stage == 3:
            compatibility.check_divisible(self.module)
        # what zero.Init has built may be too large for one rank, and stays in parts
        self._wrapping = None if self._is_divided() else ModuleSnapshot(self.module)
        self.model_to_device()
        self.sync_module(self.module)
        if training and self.activation_checkpointing is not None:
            self._recomputing = recompute(self.module, self.activation_checkpointing)
        self.wrap_model(training=training)
        if not training and self.stage == 3:
            self._start_engine(config, None)

    def model_to_device(self) -> None:
        assert self.module is not None
        if not self._is_divided():
            super().model_to_device()

    def sync_module(self, module: nn.Module) -> None:
        if not self._is_divided():
            super().sync_module(module)
        elif self.world_size > 1:
            with self.guard("broadcast of the buffers"):
                collectives.broadcast_tensors(list(module.buffers()))

    def _is_divided(self) -> bool:
        """Return True if ``zero.Init`` has built the model.

        Its parameters are placed then, with rank 0's values, and its buffers are placed.
        """
        assert self.module is not None
        return any(hasattr(parameter, "ds_id") for parameter in self.module.parameters())

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        assert self.module is not None
        if overrides(self.precision, Precision, "connect"):
            raise ConfigurationError(
                f"{type(self.precision).__name__}.connect would put others in the places of model and optimizer, which "
                "DeepSpeed's engine has: name the precision by its alias, or use strategy='ddp'"
            )
        optimizer = compatibility.only_optimizer(self.module, optimizers)
        self.lr_scheduler_configs = list(lr_scheduler_configs)
        if optimizer is None and "optimizer" not in self.config:
            self.optimizers = []
            return
        compatibility.check_trainable(self.module, optimizer, self.stage, self.compute_dtype)
        self._start_engine(self.engine_config(), optimizer)
        assert self.state is not None
        self.optimizers = [self.state.ledger.base]

    def _start_engine(self, config: dict[str, Any], optimizer: Optimizer | None) -> None:
        assert self.module is not None
        groups = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
        if optimizer is None:
            config.pop("scheduler", None) if "optimizer" not in config else None
        compatibility.check_statistics(self.module, self.compute_dtype, settings.buffer_dtype(config))
        with self.guard("start of DeepSpeed's engine"):
            self.engine = sdk.start(
                self._deepspeed,
                broadcast=self.stage == 3,
                model=StepModule(self.module),
                optimizer=optimizer,
                config=config,
            )
        self.model = self.engine
        if self.stage == 3 and self._wrapping is not None:
            vars(self.module)[_DIVIDED] = True
        if not groups:
            groups = [list(self.module.parameters())]
        self._trained = compatibility.trained(self.module)
        self._parameters = list(self.module.parameters())
        self._were_trained = [parameter.requires_grad for parameter in self._parameters]
        self._compared = self.world_size == 1 or self.stage == 0
        self.state = EngineState(PartitionMap(self.engine, self.module, groups), self.module, keep=self.is_global_zero)

    # -- end of life -----------------------------------------------------------------------------------------

    def restore_module(self) -> None:
        """Give every rank whole weights, in the precision that they are trained in, and undo what the engine did.

        The optimizer is the user's again, on rank 0 with its state, so that the Trainer can save after a run.

        A model that ``configure_model`` built under ``zero.Init`` stays divided: it may be too large for one rank. The
        next run of as many ranks takes it up.
        """
        assert self.module is not None
        wrapping = self._wrapping
        if self.state is None or wrapping is None:
            return
        with self.guard("gathering of the model"):
            whole = self.state.whole_weights()
            give_back = None
            if self.state.ledger.trains:
                give_back, self._left = self.state.give_back(), self.state.extra()
        self._wrapping = None
        self._end_engine()
        wrapping.undo(whole)
        vars(self.module).pop(_DIVIDED, None)
        if give_back is not None:
            give_back()

    def _end_engine(self) -> None:
        engine, self.engine, self.state = self.engine, None, None
        self.model = self.module
        if self._recomputing is not None:
            self._recomputing()
            self._recomputing = None
        if engine is not None:
            sdk.forget(engine)

    def teardown(self) -> None:
        try:
            self._end_engine()
            if self._wrapping is not None and self.stage < 3:  # a run that failed: every rank has whole weights
                self._wrapping.undo()
        finally:
            self._wrapping = None
            self._life.close()
            super().teardown()
