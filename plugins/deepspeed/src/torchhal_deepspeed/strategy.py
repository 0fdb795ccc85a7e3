"""Train through DeepSpeed's engine around the user's module and optimizer."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchhal.capabilities import other_stores
from torchhal.checkpoint import read
from torchhal.distributed import collectives
from torchhal.errors import CheckpointError, ConfigurationError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.plugin import Availability
from torchhal.precision import MixedPrecision, Precision, cast_tensors
from torchhal.strategies import PARALLEL_ARGUMENTS, StepResult, around_call
from torchhal_deepspeed import _compatibility as compatibility
from torchhal_deepspeed import _config as settings
from torchhal_deepspeed import _sdk as sdk
from torchhal_deepspeed._accumulation_boundary import manual_step, no_accumulation_boundary
from torchhal_deepspeed._activation_checkpointing import chooser
from torchhal_deepspeed._engine_base import DeepSpeedEngineBase
from torchhal_deepspeed._engine_state import EXTRA
from torchhal_deepspeed._uneven_inputs import uneven_forward
from torchhal_deepspeed.checkpoint import DeepSpeedCheckpointIO

_LATER = ("state_dict", "optimizer_states")
"""The parts of a checkpoint whose tensors are read when they are written into the engine."""

_requires_grad = attrgetter("requires_grad")


class DeepSpeedStrategy(DeepSpeedEngineBase):
    """``deepspeed.initialize`` over one process per device.

    Args:
        stage: what ZeRO divides among the ranks. 1: optimizer state. 2: gradients too. 3: parameters too. 0: nothing.
            None: that of ``config``, else 2.
        config: a DeepSpeed configuration, as a dict or the path of a JSON file. Entries of "auto" are filled
            in by the Trainer.
        offload_optimizer: "cpu" or "nvme", or DeepSpeed's section of that name as a dict: where the optimizer's state
            lives and steps.
        offload_parameters: the same for parameters that aren't in use (stage 3).
        nvme_path: the folder for what is offloaded to "nvme".
        activation_checkpointing: submodules whose activations backward computes again instead of keeping them: their
            classes, or a callable of a name and a module.
        logging_level: of DeepSpeed's own log.
        options: ``start_method``, ``process_group_backend``, ``timeout`` and the parts, as in
            :class:`~torchhal.strategies.ParallelStrategy`; anything else goes into the ZeRO section
            (``reduce_bucket_size``, ``overlap_comm``, ...).

    The Trainer decides where an accumulation ends and how gradients are clipped; the engine does both. Schedulers that
    ``configure_optimizers`` returns are stepped by the Trainer, one in the configuration by the engine.

    Raises:
        ConfigurationError: DeepSpeed is missing or of another version, or the arguments contradict each other.
    """

    features: ClassVar[frozenset[str]] = frozenset({"owns_clipping", "owns_optimizer_state"})
    lacks: frozenset[str] = other_stores(torch.float32)
    # the engine casts inputs, scales the loss, clips and steps itself, in the dtypes that a precision declares
    precision_methods: ClassVar[frozenset[str] | None] = frozenset(
        {
            "setup", "module_init_context", "state_dict", "load_state_dict", "rank_state_dict", "load_rank_state_dict",
            "reshard_rank_state", "teardown",
        }
    )  # fmt: skip
    implements_precisions: ClassVar[tuple[type[Precision], ...]] = (MixedPrecision,)
    default_checkpoint_io: ClassVar[str] = "deepspeed"
    inference_mode: ClassVar[bool] = False  # parameters that are gathered for a validation are used by training
    compares_replicas: ClassVar[bool] = True

    @classmethod
    def availability(cls) -> Availability:
        return sdk.DEEPSPEED.availability()

    def __init__(
        self,
        *,
        stage: int | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        offload_optimizer: str | Mapping[str, Any] | None = None,
        offload_parameters: str | Mapping[str, Any] | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        activation_checkpointing: Any = None,
        logging_level: int = logging.WARNING,
        **options: Any,
    ) -> None:
        sdk.DEEPSPEED.check()
        super().__init__(**{name: options.pop(name) for name in PARALLEL_ARGUMENTS if name in options})
        self.config = settings.combine(
            config,
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            nvme_path=nvme_path,
            zero_options=options,
        )
        if activation_checkpointing is not None:
            chooser(activation_checkpointing)
        self.activation_checkpointing = activation_checkpointing
        self.logging_level = logging_level

    # -- steps -----------------------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        """Refuse parameters that were frozen or unfrozen since the engine began, which divided them then."""
        if self.engine is not None:
            assert self.module is not None
            compatibility.check_still_trained(self.module, self._trained)

    def with_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Cast inputs to the dtype of the weights and outputs to float32: the engine has no autocast."""
        dtype = self.compute_dtype
        if dtype is torch.float32:
            return function

        def step(batch: Any, *rest: Any) -> Any:
            return cast_tensors(function(cast_tensors(batch, dtype), *rest), torch.float32)

        return step

    def module_step(self, name: str) -> Callable[..., Any]:
        assert self.module is not None
        step: Callable[..., Any] = getattr(self.module, name)
        if self.engine is None:
            return step
        if name == "training_step" and not getattr(self.module, "automatic_optimization", True):
            return manual_step(self.engine, self.module, step)
        return self._in_engine(step, training=name == "training_step")

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        if self.engine is None:
            return forward
        return around_call(forward, lambda step: self._in_engine(step, training=training))

    def _in_engine(self, step: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        assert self.module is not None
        engine = self.engine
        buffers = [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]
        if not training or not buffers or self.world_size == 1:
            return lambda *args: engine(step, *args)

        def with_buffers(*args: Any) -> Any:
            """Run the step with rank 0's buffers, as DistributedDataParallel does.

            A batch norm's statistics would else be of a rank's own data.
            """
            with self.guard("broadcast of the buffers"):
                collectives.broadcast_tensors(buffers)
            return engine(step, *args)

        return with_buffers

    @property
    def evaluation_communicates(self) -> bool:  # type: ignore[override]
        """True where parameters are divided, which a forward gathers."""
        return self.stage == 3 and self.engine is not None

    def evaluation_step_of(self, ranks: Collection[int]) -> AbstractContextManager[Any]:
        return uneven_forward(ranks, self.engine, self.broadcast)

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        return no_accumulation_boundary(self.engine) if self.engine is not None else None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward of a manual step, whose gradients the engine averages: several before one step add up."""
        self.gradients_synced = True
        self.backward(loss, *args, **kwargs)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("through") is not None:
            raise ConfigurationError(
                f"the backward() of {type(self.module).__name__} can't run under DeepSpeed, whose engine runs the "
                "backward pass itself: leave it out, or optimize by hand (automatic_optimization = False)"
            )
        if not self._compared:
            assert self.module is not None
            self._compared = True
            compatibility.check_used_alike(self.module, loss, self.all_gather_object)
        if list(map(_requires_grad, self._parameters)) != self._were_trained:  # a step has frozen or unfrozen some
            assert self.module is not None
            compatibility.check_still_trained(self.module, self._trained)
        self.engine.backward(loss, scale_wrt_gas=False)
        if self.mark_step is not None:
            self.mark_step()

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Refuse to clip: the engine has the gradients, in parts, and clips when it steps.

        Raises:
            ConfigurationError: there is an engine.
        """
        if self.engine is None:
            return super().clip_gradients(optimizer, clip_val, algorithm)
        raise ConfigurationError(
            f"clip_gradients({clip_val}) can't reach the gradients, which DeepSpeed's engine has in parts. It clips "
            f"when it steps: give DeepSpeedStrategy(config={{'gradient_clipping': {clip_val}}}), or gradient_clip_val "
            "to the Trainer of a model that doesn't optimize by hand"
        )

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        """Refuse as :meth:`clip_gradients` does; after a step ``engine.get_global_grad_norm()`` returns it.

        Raises:
            ConfigurationError: there is an engine.
        """
        if self.engine is None:
            return super().grad_norm(optimizer)
        raise ConfigurationError(
            "grad_norm can't reach the gradients, which DeepSpeed's engine has in parts: call "
            "trainer.strategy.engine.get_global_grad_norm() after the step"
        )

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Do nothing: the engine unscales when it steps."""

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Do nothing: the engine has cleared the gradients with its step."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if closure is not None:  # as of an optimizer that evaluates once; others are refused
            with torch.enable_grad():
                closure()
        self.engine.step()
        if self.mark_step is not None:
            self.mark_step()
        return StepResult.UPDATED if self.engine.was_step_applied() else StepResult.SKIPPED

    def sync_gradients(self) -> None:
        """Average the gradients, as the engine does in the last backward of an accumulation, without one."""
        self.gradients_synced = True
        if self.engine is None:
            super().sync_gradients()
            return
        self.engine.set_gradient_accumulation_boundary(True)
        with self.guard("averaging of the gradients"):
            if self.stage >= 2:
                self.engine.optimizer.finalize_gradient_accumulation_boundary()
            else:
                self.engine.allreduce_gradients()

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def engine_saves(self) -> bool:
        """True if the checkpoint IO lets the engine write what it holds."""
        return isinstance(self.checkpoint_io, DeepSpeedCheckpointIO)

    def module_state_dict(self) -> dict[str, Any]:
        if self.state is None:
            if self._is_divided():
                raise CheckpointError(
                    f"the run is over, and zero.Init has built {type(self.module).__name__} in parts that only an "
                    "engine puts together: save while it runs, with a ModelCheckpoint"
                )
            return super().module_state_dict()
        with self.guard("gathering of the model"):
            # a worker that was started for the run sends its weights to the process that called fit
            stand_ins = self.engine_saves and self.start_method == "subprocess"
            return self.state.weights(stand_ins=stand_ins, broadcast=collectives.broadcast_copies)

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        if self.state is None:
            return super().load_module_state_dict(read(dict(state)), strict=strict)
        return self.state.load_weights(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.state is None or not self.state.ledger.trains:  # after a run
            return {**super().optimizer_state(optimizer), EXTRA: self._left}
        with self.guard("gathering of the optimizer's state"):
            return self.state.optimizer(stand_ins=self.engine_saves)

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer if self.state is None else self.state.users_optimizer(), state)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self.state is None:
            super().load_optimizer_state(optimizer, read(state))
        else:
            self.check_optimizer_state(optimizer, state)
            self.state.load_optimizer(state)

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        """Return none: from stage 2 on they are the engine's, which has no way to take them back."""
        if self.state is None:
            return super().accumulated_gradients()
        if self.is_global_zero:
            warnings.warn(
                "this checkpoint is in the midst of an accumulation, whose gradients stay in DeepSpeed's engine: a run "
                "that continues from it steps without those of the batches before",
                stacklevel=2,
            )
        return {}

    def load_checkpoint(self, path: str, *, weights_only: bool = True) -> dict[str, Any]:
        """Open the folder; each tensor is read when it is loaded."""
        if "sharded" not in self.checkpoint_io.features:
            return super().load_checkpoint(path, weights_only=weights_only)
        checkpoint = self.checkpoint_io.open_checkpoint(path)
        return {key: value if key in _LATER else read(value) for key, value in checkpoint.items()}

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        """Estimate the memory under ``32-true``, without DeepSpeed's buffers for messages.

        Their size is in the configuration.
        """
        whole = model.estimate()
        trained = sum(entry.parts()[0] for entry in model.parameters if entry.parameter.requires_grad)

        def share(count: int) -> int:
            return -(-count // world_size)

        masters = 0 if self.stage == 0 else share(trained)  # fp32 values that the optimizer steps on
        note = "; ".join(filter(None, (whole.note, "state in host memory" if self._offloads else "")))
        return replace(
            whole,
            parameters=(share(whole.parameters) if self.stage == 3 else whole.parameters) + masters,
            gradients=share(whole.gradients) if self.stage >= 2 else whole.gradients,
            optimizer=share(whole.optimizer) if self.stage else whole.optimizer,
            note=note,
        )

    @property
    def _offloads(self) -> bool:
        sections = (self.config[settings.ZERO].get(key) or {} for key in ("offload_optimizer", "offload_param"))
        return any(section.get("device", "none") != "none" for section in sections)
