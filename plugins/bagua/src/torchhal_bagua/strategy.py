"""Train data parallel through Bagua: one process per GPU, and one of its algorithms between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchhal.capabilities import other_stores
from torchhal.composition import Composition
from torchhal.distributed import collectives
from torchhal.distributed.stores import Store
from torchhal.errors import DistributedError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.plugin import Availability
from torchhal.precision import Precision
from torchhal.pytree import map_tensors
from torchhal.strategies import ParallelStrategy, around_call
from torchhal.vendor_package import availability_from
from torchhal_bagua import _algorithms as algorithms
from torchhal_bagua import _compatibility as compatibility
from torchhal_bagua import _config as settings
from torchhal_bagua import _sdk as sdk
from torchhal_bagua._collectives import all_reduce, broadcast_list
from torchhal_bagua._ddp_wrapper import DDPWrapper, TouchAllParameters, check_qadam, ignored_names
from torchhal_bagua._floating_tensors import floating_tensors, is_floating

BATCHES = "bagua_batches"
"""Key in the optimizer's state in checkpoints, which optimizers elsewhere ignore."""

_OWN = (
    "start_method", "process_group_backend", "timeout", "accelerator", "precision", "precision_plugin",
    "checkpoint_io", "cluster_environment",
)  # fmt: skip
_requires_grad = attrgetter("requires_grad")
_STOPPING = 1.0  # seconds for averages in the background to end where the others may be gone


class BaguaStrategy(ParallelStrategy):
    """One process per GPU, and one of Bagua's algorithms in the place of the averaging of gradients.

    Args:
        algorithm: ``"gradient_allreduce"``: the mean of the gradients, as with ``ddp``. ``"bytegrad"``: the same, sent
            in bytes. ``"qadam"``: Adam that after a warm-up sends its momentum in bytes; needs Bagua's
            ``QAdamOptimizer``. ``"decentralized"``, ``"low_precision_decentralized"``, ``"async"``: each rank trains
            weights of its own, which are averaged with those of others before each step, after it in bytes, or in
            the background.
        flatten: let gradients (or weights) that are sent together lie together.
        find_unused_parameters: allow parameters that a step does not use. They get gradients of zero, with which
            momentum and weight decay still act.
        service_port: of Bagua's autotune service, on the first node. None: ``BAGUA_SERVICE_PORT``, or any free one.
        autotune: let that service try other sizes of messages while training. None: ``BAGUA_AUTOTUNE``, or False.
        bucket_cap_mb: size of a message. None: ``BAGUA_DEFAULT_BUCKET_SIZE`` (in bytes), or 10.
        options: ``start_method``, ``process_group_backend``, ``timeout`` and the parts, as in
            :class:`ParallelStrategy`; anything else goes to the algorithm. ``hierarchical`` (all but ``async``;
            False for ``gradient_allreduce``, else True): average within a node first. ``average``
            (``gradient_allreduce``, ``bytegrad``): False adds gradients up. ``peer_selection_mode``
            (``decentralized``): ``"all"`` or ``"shift_one"``, another rank each time. ``communication_interval``
            (``decentralized``, ``low_precision_decentralized``): batches from one average to the next.
            ``sync_interval_ms`` (500), ``warmup_steps`` (0; batches that ``async`` trains like
            ``gradient_allreduce``).

    Where ranks have weights of their own, a checkpoint and the module after a run hold the mean over the ranks, also of
    running statistics, and validation uses each rank's own. Elsewhere all three use the buffers of rank 0.

    Raises:
        ConfigurationError: Bagua missing or of another version; a value that can't be.
        TypeError: an argument that the algorithm doesn't have.
    """

    accelerators: ClassVar[frozenset[str] | None] = sdk.accelerators()

    compares_replicas: ClassVar[bool] = True

    lacks: frozenset[str] = other_stores(torch.float32, torch.float16)  # it sends gradients in these dtypes alone

    # all but connect, which would put another model in the place of the one that Bagua has
    precision_methods: ClassVar[frozenset[str] | None] = frozenset(
        name for name, value in vars(Precision).items() if callable(value) and not name.startswith("_")
    ) - {"connect"}

    @classmethod
    def availability(cls) -> Availability:
        return availability_from(sdk.check_usable)

    def __init__(
        self,
        *,
        algorithm: str = "gradient_allreduce",
        flatten: bool = True,
        find_unused_parameters: bool = False,
        service_port: int | None = None,
        autotune: bool | None = None,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{name: options.pop(name) for name in _OWN if name in options})
        self._settings = settings.environment_variables(
            flatten=flatten,
            find_unused_parameters=find_unused_parameters,
            service_port=service_port,
            autotune=autotune,
            bucket_cap_mb=bucket_cap_mb,
        )
        algorithms.check(algorithm, options, flatten=flatten)
        sdk.check_usable()
        self.algorithm = algorithm
        self.algorithm_options = options
        self.flatten = flatten
        self.find_unused_parameters = find_unused_parameters
        self._variables = sdk.Environment()
        self._wrapped: DDPWrapper | None = None
        self._arrived: set[torch.Tensor] = set()  # parameters with a gradient from the latest backward
        self._watched: list[Any] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._were_trained: list[bool] = []
        """True for those of the parameters that were trained when Bagua began to average."""

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        """The feature ``lossy`` of an algorithm that sends bytes or averages weights in part."""
        return frozenset({"lossy"}) if self._algorithm.tolerances else frozenset()

    @property
    def tolerances(self) -> Mapping[str, float]:  # type: ignore[override]
        """The greatest differences from training in one process, by algorithm."""
        return self._algorithm.tolerances

    @property
    def _algorithm(self) -> algorithms.Algorithm:
        return algorithms.ALGORITHMS[self.algorithm]

    # -- life cycle ------------------------------------------------------------------------------------------

    def check_fit(self, composition: Composition) -> None:
        compatibility.check_parts(self.algorithm, self.algorithm_options, composition)

    def setup_communication(self) -> Store | None:
        store = super().setup_communication()
        assert store is not None
        self._variables.take(
            {
                "RANK": str(self.global_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(self.local_rank),
                "LOCAL_WORLD_SIZE": str(self.environment.local_world_size()),
                "NODE_RANK": str(self.node_rank),
                "GROUP_RANK": str(self.node_rank),  # which Bagua takes for the node's where torchrun started it
                "MASTER_ADDR": self.environment.main_address,
                **self._settings,
            }
        )
        with self.guard("set-up of Bagua"):
            sdk.join(store)
        return store

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        assert self.module is not None
        compatibility.check_model(
            self.algorithm,
            self.algorithm_options,
            self.module,
            optimizers,
            accumulate=self.accumulate_grad_batches,
            clip_val=self.gradient_clip_val,
        )
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if optimizers:
            check_qadam(optimizers, trained, algorithm=self.algorithm)
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        # what never steps has nothing to communicate; and where the module runs its own backward passes, each gradient
        # is averaged after them, without Bagua
        if trained and optimizers and getattr(self.module, "automatic_optimization", True):
            self._wrap()

    def _wrap(self, batches: int = 0) -> None:
        """Give the module to Bagua, with the weights and the optimizer's state that rank 0 has now."""
        assert self.module is not None
        self._unwrap()
        with self.guard("set-up of the algorithm"):
            self._wrapped = DDPWrapper(
                self.module,
                self.optimizers,
                name=self.algorithm,
                options=self.algorithm_options,
                flatten=self.flatten,
                batches=batches,
            )
        self.model = self._wrapped.wrapper
        self._parameters = list(self.module.parameters())
        self._were_trained = list(map(_requires_grad, self._parameters))
        if not self.find_unused_parameters and self._sends_gradients:
            self._watched = [
                parameter.register_post_accumulate_grad_hook(self._arrived.add)  # type: ignore[no-untyped-call]
                for parameter in self._wrapped.parameters
            ]

    @property
    def _sends_gradients(self) -> bool:
        return not self._algorithm.own_weights or bool(self.algorithm_options.get("warmup_steps"))

    def _unwrap(self, *, together: bool = True) -> None:
        """Undo :meth:`_wrap`; ``together`` ends averages in the background along with the other ranks."""
        wrapped, self._wrapped = self._wrapped, None
        for hook in self._watched:
            hook.remove()
        self._watched = []
        self._arrived.clear()
        self.model = self.module
        if wrapped is not None:
            try:
                wrapped.pause() if together else wrapped.abandon(_STOPPING)
            finally:
                wrapped.undo()

    def restore_module(self) -> None:
        super().restore_module()
        wrapped = self._wrapped
        self._unwrap()
        self._share_buffers()
        if wrapped is not None and self._algorithm.own_weights:
            state = floating_tensors([dict(optimizer.state) for optimizer in self.optimizers])
            own = [*wrapped.parameters, *self._running_statistics(), *state]
            with torch.no_grad():
                for tensor, mean in zip(own, self.reduce(own), strict=True):
                    tensor.copy_(mean)

    def teardown(self) -> None:
        try:
            self._unwrap(together=False)  # still there, the run failed, or a loop of the user's ends here
        finally:
            try:
                super().teardown()
            finally:
                self._variables.leave()

    # -- steps -----------------------------------------------------------------------------------------------

    def on_evaluation_start(self, stage: str) -> None:
        """Evaluate what all ranks have: end averages in the background, and share the buffers."""
        super().on_evaluation_start(stage)
        self._prepare_evaluation()

    def step_function(self, name: str) -> Callable[..., Any]:
        if name != "training_step" and self.trainer is None:  # a loop by hand, which calls no hooks
            self._prepare_evaluation()
        return super().step_function(name)

    def _prepare_evaluation(self) -> None:
        self._pause()
        self._share_buffers()

    def module_step(self, name: str) -> Callable[..., Any]:
        step: Callable[..., Any] = getattr(self.module, name)
        return self._through_wrapped(step) if name == "training_step" else step

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        return around_call(forward, self._through_wrapped) if training else forward

    def _through_wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self._wrapped is None:
            return step

        def call(*args: Any) -> Any:
            assert self._wrapped is not None  # looked up each time: a checkpoint that is loaded makes a new one
            return self._wrapped.call(step, *args)

        return call

    def check_accumulation(self, batches: int) -> None:
        compatibility.check_accumulation(self.algorithm, self.algorithm_options, batches)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        compatibility.check_clipping(self.algorithm, clip_val)  # a callback may have asked for it after the set-up
        return super().clip_gradients(optimizer, clip_val, algorithm)

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        if self._wrapped is None or not self._algorithm.pauses:
            return None
        return _NoSync(self)

    def zero_grad(self, optimizer: Optimizer) -> None:
        # gradients are views of what is sent: a new tensor would have to be copied there
        optimizer.zero_grad(set_to_none=not self._sends_gradients)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        wrapped = self._wrapped
        if wrapped is None:
            super().backward(loss, *args, **kwargs)
            return
        if list(map(_requires_grad, self._parameters)) != self._were_trained:
            assert self.module is not None
            raise compatibility.frozen_in_the_run(self.module, self._parameters, self._were_trained)
        if self.find_unused_parameters:
            loss = TouchAllParameters.apply(loss, *wrapped.parameters)  # type: ignore[no-untyped-call]
        self._arrived.clear()
        try:
            super().backward(loss, *args, **kwargs)
        except BaseException:
            wrapped.close_forward()
            raise
        wrapped.open = False
        if self._watched and wrapped.sends and len(self._arrived) < len(self._watched):
            raise self._unused()

    def _unused(self) -> DistributedError:
        assert self.module is not None and self._wrapped is not None
        sent = set(self._wrapped.parameters)
        names = [
            repr(name)
            for name, parameter in self.module.named_parameters()
            if parameter in sent and parameter not in self._arrived
        ]
        return DistributedError(
            f"the parameters {', '.join(names[:8])}{' and others' if len(names) > 8 else ''} were not used by "
            f"training_step on rank {self.global_rank}, and Bagua sends nothing until their gradients are there: use "
            f"strategy={type(self).__name__}(find_unused_parameters=True, ...), or freeze them with "
            "requires_grad_(False)"
        )

    def sync_gradients(self) -> None:
        if not self._algorithm.own_weights:  # else they are each rank's own
            super().sync_gradients()

    def check_replicas(self) -> None:
        if not self._algorithm.own_weights:
            super().check_replicas()

    def parameters_to_ignore(self) -> Collection[str]:
        """Return the names that Bagua was told to leave alone."""
        return () if self.module is None else ignored_names(self.module)

    def load_accumulated_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        assert self.module is not None
        for name, parameter in self.module.named_parameters():
            if name in gradients and parameter.grad is not None:
                parameter.grad.copy_(gradients[name])
            elif name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    # -- communication ---------------------------------------------------------------------------------------

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        with self.guard(f"reduce(op={op!r})"):
            return collectives.reduce(value, op, device=self.root_device, group=group, all_reduce=all_reduce)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        with self.guard(f"broadcast(src={src})"):
            return collectives.broadcast_object(value, src, device=self.root_device, send=broadcast_list)

    def barrier(self, name: str = "") -> None:
        super().barrier(name)  # names who is missing, which Bagua's own doesn't
        if self.is_set_up and self.world_size > 1:
            from bagua.torch_api import communication

            with self.guard(f"barrier {name!r}"):
                communication.barrier()

    # -- state and checkpoints -------------------------------------------------------------------------------

    def _pause(self) -> None:
        if self._wrapped is not None:
            with self.guard("end of the averaging in the background"):
                self._wrapped.pause()

    def _share_buffers(self) -> None:
        """Broadcast rank 0's buffers where all ranks have the same weights, as ``ddp`` does: Bagua sends none."""
        if not self._algorithm.own_weights and self.module is not None:
            with self.guard("broadcast of the buffers"):
                collectives.broadcast_tensors(list(self.module.buffers()))

    def _running_statistics(self) -> list[torch.Tensor]:
        """Return the floating-point buffers, which belong to the weights of the rank that has them."""
        assert self.module is not None
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    def module_state_dict(self) -> dict[str, Any]:
        self._pause()
        state = super().module_state_dict()
        if self._wrapped is None or not self._algorithm.own_weights:
            return state
        assert self.module is not None
        own = [*self._wrapped.parameters, *self._running_statistics()]
        means = dict(zip(own, self.reduce(own), strict=True))
        for named in (self.module.named_parameters, self.module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if name in state and tensor in means:
                    state[name] = means[tensor]
        return state

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        self._pause()
        result = super().load_module_state_dict(state, strict=strict)
        self._wrap_again()
        return result

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, or its mean over the ranks where each has its own."""
        self._pause()
        state = super().optimizer_state(optimizer)
        if self._wrapped is None or not self._algorithm.own_weights:
            return state
        means = iter(self.reduce(floating_tensors(state["state"])))

        def replace(leaf: Any) -> Any:
            return next(means).to(leaf.device) if is_floating(leaf) else leaf

        return {**state, "state": map_tensors(state["state"], replace), BATCHES: self._wrapped.batches}

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer, {name: value for name, value in state.items() if name != BATCHES})

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._pause()
        super().load_optimizer_state(optimizer, {name: value for name, value in state.items() if name != BATCHES})
        self._wrap_again(int(state.get(BATCHES, 0)))

    def _wrap_again(self, batches: int = 0) -> None:
        """Wrap the module anew: what Bagua has built belongs to the weights and the state from before."""
        if self._wrapped is not None:
            self._wrap(batches)

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        estimate = super().memory_per_rank(model, world_size)
        copies = {"decentralized": 1, "low_precision_decentralized": 3, "async": 2}.get(self.algorithm, 0)
        if copies:
            estimate = estimate.plus(copies * estimate.parameters, f"{copies} copy(ies) of the weights that others see")
        return estimate


class _NoSync:
    """A context that enters the wrapper's ``no_sync()``, which is made anew each time."""

    def __init__(self, strategy: BaguaStrategy) -> None:
        self.strategy = strategy

    def __enter__(self) -> None:
        assert self.strategy._wrapped is not None
        self.context = self.strategy._wrapped.no_sync()
        self.context.__enter__()

    def __exit__(self, *exc_info: Any) -> Any:
        return self.context.__exit__(*exc_info)
