"""The base of strategies whose ranks hold parts of one model: states, clipping and checkpoints over the parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.checkpoint import read
from torchhal.distributed import collectives
from torchhal.errors import ModelError, TorchhalError
from torchhal.precision import dense_gradient
from torchhal.strategies import ParallelStrategy, around_call, forward_through
from torchhal_parallel._dtensor_layout import (
    clip_grads_with_norm_,
    full_tensor,
    gather_to_cpu,
    get_total_norm,
    place_of_part,
    to_local,
)
from torchhal_parallel._gradient_hooks import CarriedHandles, check_accumulation_hooks
from torchhal_parallel._module_restore import ForwardOverride, ModuleSnapshot
from torchhal_parallel._optimizer_checks import check_divisible, check_own_parameters, check_shardable_optimizer
from torchhal_parallel._parameter_objects import ParameterObjects, check_references
from torchhal_parallel._plain_semantics import PlainSemantics
from torchhal_parallel._replaced_parameters import ReplacedParameters
from torchhal_parallel._sharded_state import (
    check_state_shapes,
    place_like,
    place_module_state,
    place_optimizer_state,
)
from torchhal_parallel._sharding_errors import explain_sharded
from torchhal_parallel._step_runner import StepRunner

_PLACED = ("state_dict", "current_model_state", "optimizer_states", "gradients")
"""The parts of a checkpoint whose tensors this strategy's own methods load, each rank its own share."""


class ShardedStrategy(ParallelStrategy):
    """Parameters may be sharded tensors, of which each rank has a part.

    State is portable: with a checkpoint IO that one process writes, the parts are gathered on rank 0, one tensor at a
    time; with one of the feature ``sharded`` every rank gives its own. Either loads under any other strategy, and
    any other strategy's checkpoints load here.

    After a run the user's module is whole again on every rank, unless ``configure_model`` built it sharded. Its
    parameters are the objects that they were before, so that references to one give the trained weight; during the
    run these are empty, and what takes part in training must not refer to them.
    """

    inference_mode: ClassVar[bool] = False  # parameters that are gathered for a validation are used by training
    compares_replicas: ClassVar[bool] = True
    synchronizes_batchnorms: ClassVar[bool] = True

    built_on_meta = False
    """Whether the model is too large for every rank to have whole; ``configure_model`` builds it for each run."""

    _runner: StepRunner | None = None
    """What the steps run in, where the model as a whole is sharded."""

    _objects: ParameterObjects | None = None
    _replaced: ReplacedParameters | None = None
    _snapshot: ModuleSnapshot | None = None
    _divided: AbstractSet[nn.Parameter] = frozenset()
    """The parameters that there were when the model was divided."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._carried_hooks = CarriedHandles()
        self._plain_semantics = PlainSemantics(self.guard, self._parameters)

    def _parameters(self) -> Iterable[nn.Parameter]:
        return () if self.module is None else self.module.parameters()

    # -- the user's module -----------------------------------------------------------------------------------

    def setup_model(self, *, training: bool = True) -> None:
        assert self.module is not None
        self.built_on_meta = self.is_on_meta()
        if getattr(self.module, "_torchhal_in_parts", False):
            raise ModelError(
                f"an earlier run that failed has left {type(self.module).__name__} in parts: build a new one, and "
                "continue from a checkpoint"
            )
        alias = self.display_name
        self._objects = ParameterObjects(self.module)
        self._snapshot = None if self.built_on_meta else ModuleSnapshot(self.module, self._objects)
        try:
            super().setup_model(training=training)
        finally:
            if self._snapshot is not None and self._objects.any_replaced():
                self.module.__dict__["_torchhal_in_parts"] = True
        self._plain_semantics.enable()
        with self._whole_if_refused():
            self._objects.settle(alias)
            if training:
                check_accumulation_hooks(self._objects.replaced(), alias)
                for name, parameter in self._objects.replaced():
                    if parameter._backward_hooks:
                        self.carry_hooks(parameter._backward_hooks, self.module.get_parameter(name))
            self._check_references()

    @contextmanager
    def _whole_if_refused(self) -> Iterator[None]:
        """Put the model back whole, and raise on every rank, when any refuses inside. Called on every rank."""
        refusal: TorchhalError | None = None
        try:
            yield
        except TorchhalError as error:
            refusal = error
        everybody = self.all_gather_object(refusal) if self.world_size > 1 else [refusal]
        refusal = refusal or next((error for error in everybody if error is not None), None)
        if refusal is None:
            return
        try:
            self.restore_module()
            self.barrier("the end of the gathering of a refused model")  # a rank that returns first closes connections
        except TorchhalError as error:
            raise refusal from error
        raise refusal

    def setup(self, trainer: Any) -> None:
        training = trainer.state.fn == "fit"
        self.setup_model(training=training)
        if training:
            with self._whole_if_refused():
                self.setup_optimizers(*trainer.configure_optimizers())
            self._watch_replacement()

    def _watch_replacement(self) -> None:
        assert self.module is not None
        if self.world_size > 1:
            self._replaced = ReplacedParameters(self.module, self.display_name)

    def _allow_replacement(self) -> None:
        if self._replaced is not None:
            self._replaced.stop()
            self._replaced = None

    def _check_references(self, *, through_optimizers: bool = False) -> None:
        assert self._objects is not None
        check_references(
            self._takes_part(), self._objects, skip=(self, self.trainer), alias=self.display_name,
            through_optimizers=through_optimizers,
        )  # fmt: skip

    def carry_hooks(self, hooks: Mapping[int, Any], parameter: nn.Parameter) -> None:
        """Let ``hooks``, registered on a parameter of the user's, run on the gradient of the one in its place."""
        self._carried_hooks.carry(hooks, parameter)

    def _takes_part(self) -> dict[str, Any]:
        """Return what may use parameters in a fit, by the names that a message gives it."""
        found: dict[str, Any] = {type(self.module).__name__: self.module}
        if self.trainer is not None:
            found |= {f"the callback {type(each).__name__}": each for each in self.trainer.callbacks}
            found["the datamodule"] = self.trainer.datamodule
        return found

    def part_of(self, parameter: nn.Parameter) -> tuple[Any, torch.Tensor]:
        return place_of_part(parameter), to_local(parameter.detach())

    def is_on_meta(self) -> bool:
        """Return whether some of the model has no memory yet, on any rank. Called on every rank."""
        assert self.module is not None
        return any(tensor.is_meta for tensor in (*self.module.parameters(), *self.module.buffers()))

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        assert self.module is not None
        self._divided = set(self.module.parameters())
        alias = self.display_name
        for optimizer in optimizers:
            check_own_parameters(optimizer, self._divided)
            if self.is_divided():
                check_divisible(optimizer, alias)
            if self.is_sharded():
                check_shardable_optimizer(optimizer)
        if not getattr(self.module, "automatic_optimization", True) and self._objects is not None:
            self._check_references(through_optimizers=True)  # a step of its own with an old one would train nothing
        super().setup_optimizers(optimizers, lr_scheduler_configs)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if (error := self.find_new_parameter()) is not None:
            raise error

    def find_new_parameter(self) -> ModelError | None:
        """Return the error for a trained parameter that came after the model was divided, else None.

        Its values would be each rank's own.
        """
        assert self.module is not None
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and self._divided and parameter not in self._divided:
                return ModelError(
                    f"{name!r} has come into {type(self.module).__name__} while it was trained, after the model was "
                    f"divided among the ranks, and strategy {self.display_name!r} would not train it: "
                    "replace a layer before fit, or in configure_model"
                )
        return None

    def is_divided(self) -> bool:
        """Return whether this rank lacks a part of some parameter; the same on every rank."""
        assert self.module is not None
        return any(parameter is not to_local(parameter) for parameter in self.module.parameters())

    def is_sharded(self) -> bool:
        """Return whether a rank has a part of some parameter, not all of it or nothing; the same on every rank."""
        return self.is_divided()

    def restore_module(self) -> None:
        assert self.module is not None
        self._allow_replacement()
        if self._snapshot is None:
            return
        with self.guard("gathering of the model"):
            whole_model = self.whole_tensors()
        self._carried_hooks.remove()
        self._snapshot.restore(self.module, whole_model)
        self.module.__dict__.pop("_torchhal_in_parts", None)
        self.model, self.model_is_connected = self.module, False
        self._runner, self._snapshot, self._objects = None, None, None

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """Return every parameter and buffer, whole, in the host memory of every rank; one at a time on the devices."""
        assert self.module is not None
        tensors = [
            *self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers(remove_duplicate=False)
        ]  # fmt: skip
        return {name: full_tensor(tensor.detach()).cpu() for name, tensor in tensors if not tensor.is_meta}

    def release_model(self) -> None:
        self._allow_replacement()
        if self.module is not None:
            ForwardOverride.remove(self.module)  # also of one that a failed run has left in parts
        self._carried_hooks.remove()
        self._plain_semantics.disable()
        self._divided, self._runner, self._objects, self._snapshot = frozenset(), None, None, None
        super().release_model()

    @property
    def saves_shards(self) -> bool:
        """True if the checkpoint IO takes each rank's part as it is."""
        return "sharded" in self.checkpoint_io.features

    def explain(self, error: BaseException) -> BaseException:
        """Return a ModelError for an operator that torch can't compute with sharded tensors, else ``error``."""
        objects = self._objects
        found = explain_sharded(
            error,
            alias=self.display_name,
            model=type(self.module).__name__,
            replaced=None if objects is None else objects.replaced,
        )
        return super().explain(error) if found is None else found

    # -- steps -----------------------------------------------------------------------------------------------

    def user_step(self, name: str) -> Callable[..., Any]:
        """Return the module's own step, with a check of unused parameters at its first call."""
        step: Callable[..., Any] = getattr(self.module, name)
        called = name != "training_step" or self._objects is None

        @functools.wraps(step)
        def call(*args: Any) -> Any:
            nonlocal called
            result = step(*args)
            if not called and self._objects is not None:
                self._objects.check_unused(self.display_name)
                called = True
            return result

        return step if called else call

    def module_step(self, name: str) -> Callable[..., Any]:
        step = self.user_step(name)
        if name == "training_step":
            if not getattr(self.module, "automatic_optimization", True):
                return step
            if self.model_is_connected:
                return self._through_connected(step)
        return step if self._runner is None else lambda *args: self._runner(step, *args)  # type: ignore[misc]

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        if training and self.model_is_connected and self.automatic_optimization:
            return around_call(forward, self._through_connected)
        return forward  # that of a sharded model runs inside its hooks wherever it is called

    def _through_connected(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` as run by the module that the precision's ``connect`` has put around the model."""

        def call(*args: Any) -> Any:
            runner = self._runner
            if runner is None:
                return forward_through(self, self.module, step)(*args)
            return forward_through(self, runner, functools.partial(runner.forward, step))(*args)

        return call

    # -- state -----------------------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        return self._portable(super().module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._portable(super().optimizer_state(optimizer))

    def _portable(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.saves_shards:
            return state
        with self.guard("gathering of the state"):
            return gather_to_cpu(state, keep=self.keeps_gathered)  # type: ignore[no-any-return]

    @property
    def keeps_gathered(self) -> bool:
        """True if this rank needs what it helps to gather: rank 0, which saves it."""
        return self.is_global_zero

    def load_checkpoint(self, path: str, *, weights_only: bool = True) -> dict[str, Any]:
        """Open a sharded checkpoint without reading it: each tensor is read when its layout is known."""
        if "sharded" not in self.checkpoint_io.features:
            return super().load_checkpoint(path, weights_only=weights_only)
        checkpoint = self.checkpoint_io.open_checkpoint(path)
        return {key: value if key in _PLACED else read(value) for key, value in checkpoint.items()}

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        assert self.module is not None
        with torch.no_grad():
            return super().load_module_state_dict(place_module_state(state, self.module.state_dict()), strict=strict)

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer, state)
        check_state_shapes(optimizer, state)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.check_optimizer_state(optimizer, state)
        super().load_optimizer_state(optimizer, place_optimizer_state(optimizer, state))

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        assert self.module is not None
        self.sync_gradients()
        gradients = {
            name: parameter.grad.detach()
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None and not parameter.is_meta
        }
        if self.saves_shards:
            return gradients
        with self.guard("gathering of the gradients"):
            return {name: full_tensor(gradient).cpu() for name, gradient in gradients.items()}

    def load_accumulated_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        assert self.module is not None
        for name, parameter in self.module.named_parameters():
            if name in gradients and not parameter.is_meta:
                placed = place_like(f"the gradient of {name}", gradients[name], parameter.detach())
                parameter.grad = placed.clone()  # the accumulation writes to it

    # -- gradients -------------------------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """Average the gradients of parameters that are whole on every rank; the others' are averaged in backward."""
        self.gradients_synced = True
        if self.world_size > 1 and (plain := self.replicated_parameters()):
            with self.guard("averaging of the gradients"):
                collectives.average_gradients(plain, frozen=True)

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters whose gradients only this strategy averages."""
        return []

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Clip by the norm over all parts of all parameters; returns it, 0-d and the same on every rank."""
        if algorithm not in ("norm", "value"):
            raise ValueError(f"'algorithm' must be 'norm' or 'value' (got {algorithm!r})")
        self.unscale_gradients(optimizer)
        gradients = self._gradients(optimizer)
        if algorithm == "value":
            for gradient in gradients:
                to_local(gradient).clamp_(-clip_val, clip_val)
            return None
        norm = self._norm(gradients)
        clip_grads_with_norm_(gradients, norm, clip_val)
        return norm

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        self.unscale_gradients(optimizer)
        return self._norm(self._gradients(optimizer))

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        with self.guard("the norm of the gradients"):
            return get_total_norm(gradients, squares=self.sum_of_squares)

    def _gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return the gradients of the parameters that this rank has, or has a part of."""
        parameters = [p for p in self.precision.main_params(optimizer) if p.grad is not None and not p.is_meta]
        return [dense_gradient(parameter) for parameter in parameters]

    def sum_of_squares(self, square: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares over the whole model, from that over the parameters of this rank."""
        return square
