"""Several processes that act as one: ranks, the process group, collectives with names and timeouts."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from torchhal.cluster import ClusterEnvironment
from torchhal.errors import ConfigurationError, DistributedError, ModelError
from torchhal.launchers import (
    ExternalLauncher,
    Launcher,
    MultiprocessingLauncher,
    SubprocessScriptLauncher,
    failures,
    flight,
)
from torchhal.launchers.process import write_stderr
from torchhal.launchers.rendezvous import generation_store
from torchhal.launchers.stores import HashStore, PrefixedStore, Store
from torchhal.launchers.subprocess_script import shared_threads
from torchhal.strategies import collectives
from torchhal.strategies.base import Strategy

START_METHODS = ("subprocess", "spawn", "fork", "forkserver")


class ParallelStrategy(Strategy):
    """One process per device, joined in a torch process group; the base class of strategies for several devices.

    Args:
        start_method: how the processes of a node start when nobody outside has: ``"subprocess"`` runs the script
            again for each, ``"spawn"``, ``"fork"`` and ``"forkserver"`` start workers that run only the Trainer's
            call.
        process_group_backend: None for the accelerator's.
        timeout: how long a collective or barrier waits for the other ranks.
        parts: see :class:`Strategy`.
    """

    multi_device: ClassVar[bool] = True

    def __init__(
        self,
        *,
        start_method: str = "subprocess",
        process_group_backend: str | None = None,
        timeout: timedelta = Strategy.timeout,
        **parts: Any,
    ) -> None:
        if start_method not in START_METHODS:
            raise ConfigurationError(
                f"'start_method' must be one of {', '.join(map(repr, START_METHODS))} (got {start_method!r})"
            )
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ConfigurationError(f"'timeout' must be a positive datetime.timedelta (got {timeout!r})")
        super().__init__(**parts)
        self.start_method = start_method
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.gradients_synced = False
        """Whether :meth:`manual_backward` has run: without it, ranks that optimize by hand drift apart."""
        self._owns_process_group = False
        self._shared_threads = ExitStack()
        self._error_before: BaseException | None = None

    # -- processes and ranks ---------------------------------------------------------------------------------

    @property
    def environment(self) -> ClusterEnvironment:
        environment: ClusterEnvironment = self._part(self.cluster_environment, "cluster environment")
        return environment

    def num_local_processes(self, num_devices: int) -> int:
        return num_devices

    def make_launcher(self) -> Launcher:
        environment = self.environment
        processes = self.num_local_processes(len(self.devices))
        environment.configure(num_nodes=self.num_nodes, local_world_size=processes)
        environment.validate_settings(num_devices=processes, num_nodes=self.num_nodes)
        if environment.creates_processes_externally:
            return ExternalLauncher()
        prepare = type(self.accelerator)._register  # or a worker can't unpickle this strategy's devices
        if "owns_launch" in environment.features:
            return environment.make_launcher(device_type=self.accelerator.device_type, prepare=prepare)
        if processes == self.num_nodes == 1:
            return ExternalLauncher()
        if self.start_method == "subprocess":
            return SubprocessScriptLauncher(environment, processes, num_nodes=self.num_nodes)
        return MultiprocessingLauncher(
            environment,
            processes,
            num_nodes=self.num_nodes,
            start_method=self.start_method,
            prepare=prepare,
        )

    @property
    def root_device(self) -> torch.device:
        if self.devices and self.num_local_processes(len(self.devices)) > 1:
            return self.devices[self.local_rank]
        return super().root_device

    @property
    def global_rank(self) -> int:
        return 0 if self.cluster_environment is None else self.cluster_environment.global_rank()

    @property
    def local_rank(self) -> int:
        return 0 if self.cluster_environment is None else self.cluster_environment.local_rank()

    @property
    def node_rank(self) -> int:
        return 0 if self.cluster_environment is None else self.cluster_environment.node_rank()

    @property
    def world_size(self) -> int:
        return 1 if self.cluster_environment is None else self.cluster_environment.world_size()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._environment_ready:
            return
        self._error_before = sys.exc_info()[1]
        self._share_cores()
        self.accelerator.setup_process(
            global_rank=self.global_rank, local_rank=self.local_rank, world_size=self.world_size
        )
        super().setup_environment()

    def _share_cores(self) -> None:
        """Give each process of this node its share of the cores, as a launcher from outside would."""
        local = self.environment.local_world_size()
        if local > 1:
            self._shared_threads.enter_context(shared_threads(local))

    def setup_communication(self) -> Store | None:
        """Join torch's process group, or use the one that exists."""
        environment = self.environment
        rank, world_size = environment.global_rank(), environment.world_size()
        store: Store
        if dist.is_initialized():  # the user's own: used, never destroyed
            if dist.get_world_size() != world_size or dist.get_rank() != rank:
                raise ConfigurationError(
                    f"a process group of {dist.get_world_size()} processes exists already, and this process is rank "
                    f"{dist.get_rank()} in it, but the strategy was set up as rank {rank} of {world_size}"
                )
            self._check_group(dist.group.WORLD)
            # its store may hold what an earlier life of ours left: this life's name keeps them apart
            name = collectives.all_gather_object(uuid.uuid4().hex)[0]
            store = PrefixedStore(f"torchhal/{name}", dist.distributed_c10d._get_default_store())
        else:
            store = HashStore() if world_size == 1 else generation_store(environment, self.timeout)
            flight.switch_on()
            with failures.one_rank_prefix():
                dist.init_process_group(
                    self._backend(), store=store, rank=rank, world_size=world_size, timeout=self.timeout
                )
            self._owns_process_group = True
            self._name_default_backend(dist.group.WORLD)
        return store

    def _name_default_backend(self, group: Any) -> None:
        """Tell a group of several backends which is the device's: torch asks that one for hooks, when the group ends at
        the latest, finds by itself hardly more than its own, and warns on every rank that it has found none."""
        name, backend = "", self._backend()
        if ":" in backend:  # of one alone torch knows it
            name = dict(part.split(":", 1) for part in backend.split(",")).get(self.root_device.type, "")
        kind = getattr(dist.Backend, "backend_type_map", {}).get(name.lower())
        if kind is not None and hasattr(group, "_set_default_backend"):
            group._set_default_backend(kind)

    def _check_group(self, group: Any) -> None:
        """Refuse a process group that can't carry this device's tensors: its first collective might hang."""
        kind = self.root_device.type
        try:
            group._get_backend(torch.device(kind))
        except RuntimeError as error:
            raise ConfigurationError(
                f"a process group exists already, but its backend {dist.get_backend()!r} doesn't carry tensors of "
                f"device type {kind!r}: make it with backend={self._backend()!r}, or leave it to the strategy"
            ) from error

    def _backend(self) -> str:
        backend = self.process_group_backend or self.accelerator.backend
        if ":" in backend or self.root_device.type == "cpu":
            return backend
        # objects travel through host memory: their own gloo group keeps them off the device
        return f"cpu:gloo,{self.root_device.type}:{backend}"

    def sync_module(self, module: nn.Module) -> None:
        if self.world_size > 1:
            with self.guard("broadcast of the initial weights"):
                self.check_same_module(module)
                _own_buffer_memory(module)
                collectives.broadcast_tensors([*module.parameters(), *module.buffers()])

    def check_same_module(self, module: nn.Module) -> None:
        """Raise on every rank alike when the ranks built different models."""
        tensors = [*module.named_parameters(), *module.named_buffers()]
        lazy = [name for name, tensor in tensors if is_lazy(tensor)]
        described = [
            (name, "lazy" if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in tensors
        ]
        everybody = collectives.all_gather_object(described)
        for rank, others in enumerate(everybody[1:], start=1):
            if others != everybody[0]:
                pairs = zip_longest(everybody[0], others, fillvalue="nothing in its place")
                first = next(pair for pair in pairs if pair[0] != pair[1])
                raise DistributedError(
                    "every rank must build the same model (names, shapes, dtypes, what is trained, in one order), but "
                    f"where rank 0 has {first[0]}, rank {rank} has {first[1]}"
                )
        if lazy:
            raise ModelError(
                f"{', '.join(map(repr, lazy[:3]))} of {type(module).__name__} have no shape yet, and ranks can't share "
                "them: run a dummy batch through the model in __init__ or configure_model"
            )

    def teardown(self) -> None:
        self._explain_what_ended_the_loop()
        self.watch.stop()
        try:
            super().teardown()
        finally:
            if self._owns_process_group:
                self._owns_process_group = False
                if dist.is_initialized():
                    dist.destroy_process_group()
            self._shared_threads.close()

    def _explain_what_ended_the_loop(self) -> None:
        """Say what is behind a process group's bare error, on which a loop of one's own ends here.

        The Trainer's errors have been explained before, and are none of a process group's any more.
        """
        error, before = sys.exc_info()[1], self._error_before
        self._error_before = None
        if error is None or error is before or not failures.is_transport_error(error):
            return  # a life that an error's handler has begun isn't ended by it
        explained = self.explain(error)
        if explained is not error:
            note = f"{type(explained).__name__}: {explained}"
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # Python 3.10
                write_stderr(f"torchhal: {note}\n")

    def explain(self, error: BaseException) -> BaseException:
        return error if isinstance(error, DistributedError) else self.watch.explain(error)

    # -- communication ---------------------------------------------------------------------------------------

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn a process group's bare error into one that names ``what`` and the ranks that failed or are missing."""
        hang = self.watch.hang
        before, hang.doing = hang.doing, what
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, DistributedError):
                raise
            explained = self.watch.explain(error, name=what)
            if explained is error:
                raise
            raise explained from error
        finally:
            hang.doing = before

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        with self.guard(f"reduce(op={op!r})"):
            return collectives.reduce(value, op, device=self.root_device, group=group)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        with self.guard(f"broadcast(src={src})"):
            return collectives.broadcast_object(value, src, device=self.root_device)

    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        with self.guard("all_gather"):
            return collectives.all_gather(tensor, device=self.root_device, group=group, sync_grads=sync_grads)

    def all_gather_object(self, value: Any) -> list[Any]:
        with self.guard("all_gather_object"):
            return collectives.all_gather_object(value)

    def barrier(self, name: str = "") -> None:
        if self.world_size > 1:
            self.watch.barrier(name or "barrier", self.timeout)

    def sync_gradients(self) -> None:
        assert self.module is not None
        if self.world_size > 1:
            with self.guard("averaging of the gradients"):
                collectives.average_gradients(list(self.module.parameters()))
        self.gradients_synced = True

    # -- manual optimization and state -----------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        # Buffers such as a batch norm's statistics follow each rank's own data: rank 0's are the model's. They go into
        # copies, for saving must not change a run.
        assert self.module is not None
        state = super().module_state_dict()
        if self.world_size > 1:
            names = sorted(name for name, _ in self.module.named_buffers(remove_duplicate=False) if name in state)
            with self.guard("broadcast of the buffers"):
                state.update(collectives.broadcast_copies({name: state[name] for name in names}))
        return state

    def module_step(self, name: str) -> Callable[..., Any]:
        step = super().module_step(name)
        if name != "training_step" or self.model is self.module:
            return step
        if not getattr(self.module, "automatic_optimization", True):
            return step  # each manual_backward averages by hand: its backward passes run inside the step
        return forward_through(self, self.module, step)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.backward(loss, *args, **kwargs)
        self.sync_gradients()


def _own_buffer_memory(module: nn.Module) -> None:
    """Give every buffer that repeats one element, as ``expand`` makes them, memory of its own: a broadcast writes."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and any(
                stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
            ):
                owner._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def forward_through(strategy: ParallelStrategy, module: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` run as the forward of ``strategy.model``, which wraps ``module`` and hooks only forward.

    While the wrapper calls the module, the module's forward is the step; inside the step it is its own again, so
    that the user's ``self(x)`` means what it says. The wrapper is looked up each time: whoever keeps the step does not
    keep the wrapper, and what it holds of the process group, beyond the strategy's life.
    """
    attributes = module.__dict__
    own_forward: Any = None  # one that was set on the instance, perhaps in the midst of training

    def redirected(*args: Any, **kwargs: Any) -> Any:
        if own_forward is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = own_forward
        return step(*args, **kwargs)

    def call(*args: Any) -> Any:
        nonlocal own_forward
        own_forward = attributes.get("forward")
        attributes["forward"] = redirected
        try:
            return strategy.model(*args)
        finally:
            if attributes.get("forward") is redirected:  # the wrapper never reached the module
                if own_forward is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = own_forward

    return call
