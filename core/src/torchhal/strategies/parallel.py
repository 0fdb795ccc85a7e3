"""Provide the base of strategies of several processes: ranks, the process group, collectives with timeouts."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from torchhal.cluster import ClusterEnvironment
from torchhal.distributed import _flight_recorder as flight_recorder
from torchhal.distributed import collectives, failures
from torchhal.distributed.process import write_stderr
from torchhal.distributed.rendezvous import generation_store, next_generation, withdraw
from torchhal.distributed.stores import HashStore, PrefixedStore, Store
from torchhal.errors import ConfigurationError, DistributedError, ModelError
from torchhal.launchers import ExternalLauncher, Launcher, MultiprocessingLauncher, SubprocessScriptLauncher
from torchhal.launchers.subprocess_script import shared_threads
from torchhal.memory_estimate import ModelMemory
from torchhal.step_memory import MemoryByPhase, StepMemory, setup_memory
from torchhal.strategies._forward_through import forward_through
from torchhal.strategies._module_structure import check_same_tensors, unshare_buffer_memory
from torchhal.strategies._process_group import (
    check_supports_device,
    import_default_arguments,
    reset_group_count,
    set_default_backend,
)
from torchhal.strategies._replica_consistency import check_frequencies, check_lookups, find_difference
from torchhal.strategies._steps import around_call
from torchhal.strategies.base import Strategy

START_METHODS = ("subprocess", "spawn", "fork", "forkserver")

PARALLEL_ARGUMENTS: Final = (
    "start_method", "process_group_backend", "timeout", "accelerator", "precision", "precision_plugin", "checkpoint_io",
    "cluster_environment",
)  # fmt: skip
"""Arguments of :class:`ParallelStrategy`, for a subclass whose other options go to an engine."""


class ParallelStrategy(Strategy):
    """One process per device, joined in a torch process group; the base class of strategies for several devices.

    Args:
        start_method: how the processes of a node start if no launcher outside does it: ``"subprocess"`` runs the script
            again for each, ``"spawn"``, ``"fork"`` and ``"forkserver"`` start workers that run only the Trainer's
            call.
        process_group_backend: None for the accelerator's.
        timeout: the longest wait for other ranks: to meet them, in a barrier, in a collective.
        parts: see :class:`Strategy`.
    """

    multi_device: ClassVar[bool] = True

    compares_replicas: ClassVar[bool] = False
    """True if ranks with the same part of the weights must have the same values in it when a fit ends.

    :meth:`check_replicas` compares them then; :meth:`part_of` defines the parts: all of them are the same by default.
    Not for a strategy whose ranks have weights of their own for a while, as local SGD does.
    """

    synchronizes_batchnorms: ClassVar[bool] = False
    """True if batch norms can compute over the batches of all ranks.

    Each rank runs the module itself, in torch's process group, on samples of its own. :meth:`check_sync_batchnorm`
    passes then, and :meth:`batch_group` is the world.
    """

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
        """True if :meth:`manual_backward` has run since set-up: without it, ranks with manual optimization diverge."""
        self._owns_process_group = False
        self._generation: int | None = None
        """The number of the current set-up, equal on all ranks."""
        self._group_store: Store | None = None
        """The new process group's, while it is set up."""
        self._shared_threads = ExitStack()
        self._flight_recorder = ExitStack()
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
        if environment.creates_processes_externally:
            self._join(environment)
            return ExternalLauncher()
        processes = self.num_local_processes(len(self.devices))
        environment.configure(num_nodes=self.num_nodes, local_world_size=processes)
        environment.validate_settings(num_devices=processes, num_nodes=self.num_nodes)
        prepare = type(self.accelerator)._register  # or a worker can't unpickle this strategy's devices
        if "owns_launch" in environment.features:
            launcher = environment.make_launcher(device_type=self.accelerator.device_type, prepare=prepare)
            return cast(Launcher, launcher)
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

    def _join(self, environment: ClusterEnvironment) -> None:
        """Determine the node data that no variable holds, and compare it with the request."""
        try:
            environment.join(self.timeout)
            if "num_nodes" in self.left_to_launcher:
                self.num_nodes = environment.num_nodes()
            if "devices" in self.left_to_launcher:
                self._take_devices(environment.local_world_size())
            processes = self.num_local_processes(len(self.devices))
            environment.configure(num_nodes=self.num_nodes, local_world_size=processes)
            environment.validate_settings(num_devices=processes, num_nodes=self.num_nodes)
        except BaseException as error:  # the others wait for this rank in a set-up
            withdraw(environment, next_generation(), error)
            raise

    def _take_devices(self, local_world_size: int) -> None:
        """Use one device for each process of this node, if the strategy works that way."""
        if self.num_local_processes(local_world_size) == local_world_size:
            self.devices = list(self.accelerator.get_parallel_devices(self.accelerator.parse_devices(local_world_size)))

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

    def check_sync_batchnorm(self, world_size: int) -> None:
        if world_size > 1 and not self.synchronizes_batchnorms:
            super().check_sync_batchnorm(world_size)

    def batch_group(self) -> Any:
        return dist.group.WORLD if self.synchronizes_batchnorms and self.world_size > 1 else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._environment_ready:
            return
        self._error_before = sys.exc_info()[1]
        self._generation = next_generation()
        try:
            self.environment.join(self.timeout)  # a custom loop may call this without a launcher
            self._share_cores()
            self.accelerator.setup_process(
                global_rank=self.global_rank, local_rank=self.local_rank, world_size=self.world_size
            )
            super().setup_environment()
        except BaseException as error:
            self._leave_set_up(error, self._generation)
            raise
        finally:
            self._group_store = self._generation = None

    def _leave_set_up(self, error: BaseException, generation: int) -> None:
        """Announce to the others that this rank's set-up has failed, and discard its state."""
        store = self._group_store
        if store is None:
            withdraw(self.environment, generation, error)
        elif self.world_size > 1:  # they have met already, and some may have continued
            self.watch.report_failure(error)
            self.watch.stop(error)
            self._watch = None
        self._shared_threads.close()
        self._destroy_process_group()

    def _destroy_process_group(self) -> None:
        if self._owns_process_group:
            self._owns_process_group = False
            if dist.is_initialized():
                dist.destroy_process_group()
        self._flight_recorder.close()

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
            self.check_group(dist.group.WORLD)
            # its store may hold keys of an earlier set-up: this one's prefix separates them
            name = collectives.all_gather_object(uuid.uuid4().hex)[0]
            store = PrefixedStore(f"torchhal/{name}", dist.distributed_c10d._get_default_store())
        else:
            store = HashStore() if world_size == 1 else generation_store(environment, self.timeout, self._generation)
            self._group_store = store
            self._watch_ranks(store)  # the only report of a failed rank to those that wait in init_process_group
            self._flight_recorder.enter_context(flight_recorder.recording())
            reset_group_count()
            import_default_arguments()
            with failures.one_rank_prefix():
                dist.init_process_group(
                    self.group_backend(), store=store, rank=rank, world_size=world_size, timeout=self.timeout
                )
            self._owns_process_group = True
            # a rank that has finished, and fails, would close connections that others are about to use
            self.barrier("connections of the process group")
            self._name_default_backend(dist.group.WORLD)
        return store

    def _name_default_backend(self, group: Any) -> None:
        set_default_backend(group, self.group_backend(), self.root_device.type)

    def check_group(self, group: Any) -> None:
        """Raise an error if the process group that the user has made can't carry tensors of this rank's device.

        Args:
            group: the default process group.

        Raises:
            ConfigurationError: it can't.
        """
        check_supports_device(group, self.root_device.type, self.group_backend())

    def group_backend(self) -> str:
        """Return the backend of the process group, as ``init_process_group`` takes it.

        That of ``process_group_backend``, else the accelerator's; on a device, gloo for objects beside it.
        """
        backend = self.process_group_backend or self.accelerator.backend
        if ":" in backend or self.root_device.type == "cpu":
            return backend
        # objects travel through host memory: their own gloo group keeps them off the device
        return f"cpu:gloo,{self.root_device.type}:{backend}"

    def connect(self, module: nn.Module) -> None:
        super().connect(module)
        self.gradients_synced = False

    def setup_model(self, *, training: bool = True) -> None:
        share = self.distributed_sampler_kwargs
        if training and share is not None and share["num_replicas"] > 1:
            assert self.module is not None, "connect() comes first"
            replicas = f"each of {share['num_replicas']} replicas"
            check_lookups(self.module, f"{replicas} would look up, and scale, other rows")
            check_frequencies(self.module, replicas)
        super().setup_model(training=training)

    def sync_module(self, module: nn.Module) -> None:
        unshare_buffer_memory(module)  # a wrapper writes to the buffers of one rank, too
        if self.world_size > 1:
            with self.guard("broadcast of the initial weights"):
                self.check_same_module(module)
                collectives.broadcast_tensors([*module.parameters(), *module.buffers()])

    def memory_by_phase(self, step: StepMemory, model: ModelMemory, world_size: int) -> MemoryByPhase:
        """Return the phases, with the broadcast of the initial weights."""
        found = super().memory_by_phase(step, model, world_size)
        return found if world_size == 1 else replace(found, setup=setup_memory(model))

    def check_same_module(self, module: nn.Module) -> None:
        """Raise on every rank when the ranks have built different models."""
        tensors = [*module.named_parameters(), *module.named_buffers()]
        lazy = [name for name, tensor in tensors if is_lazy(tensor)]
        check_same_tensors(tensors)
        if lazy:
            raise ModelError(
                f"{', '.join(map(repr, lazy[:3]))} of {type(module).__name__} have no shape yet, and ranks can't share "
                "them: run a dummy batch through the model in __init__ or configure_model"
            )

    def check_same_parameters(self, module: nn.Module) -> None:
        """Raise on every rank when the ranks train different parameters."""
        check_same_tensors(list(module.named_parameters()))

    def check_same_trained(self, changed: Sequence[nn.Parameter]) -> None:
        """Raise on every rank when the ranks train different parameters of the module, some of which were changed.

        The comparison waits for ranks that have changed nothing, which is an error after the timeout, and begins with a
        barrier in the store: no other collective can be matched with it.

        Args:
            changed: what was frozen or unfrozen since the last comparison; its first parameter is named.

        .. versionadded:: 0.2
        """
        assert self.module is not None
        what = "comparison of what is trained"
        if changed:
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            done = "unfrozen" if changed[0].requires_grad else "frozen"
            what += f", as {names.get(changed[0], 'a parameter')!r} was {done}"
        self.barrier(what)
        with self.guard(what):
            self.check_same_parameters(self.module)

    def teardown(self) -> None:
        self.watch.stop(self._explain_what_ended_the_loop())
        try:
            super().teardown()
        finally:
            self._destroy_process_group()
            self._shared_threads.close()

    def _explain_what_ended_the_loop(self) -> Exception | None:
        """Print the cause of a process group's bare error that ends a loop without a Trainer; return any other error.

        The Trainer's errors have been replaced before, and are no process group's errors any more.
        """
        error, before = sys.exc_info()[1], self._error_before
        self._error_before = None
        if not isinstance(error, Exception) or error is before:
            return None  # a set-up begun in the error's handler isn't ended by it
        if not failures.is_transport_error(error):
            return error
        explained = self.explain(error)
        if explained is not error:
            note = f"{type(explained).__name__}: {explained}"
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # Python 3.10
                write_stderr(f"torchhal: {note}\n")
        return None

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
            ignored = set(self.parameters_to_ignore())
            averaged = [each for name, each in self.module.named_parameters() if name not in ignored]
            with self.guard("averaging of the gradients"):
                collectives.average_gradients(averaged, frozen=True)
        self.gradients_synced = True

    def check_replicas(self) -> None:
        """Raise DistributedError, on every rank, if :attr:`compares_replicas` and replicas have diverged.

        The user's module is an ordinary one again by then, as after a run that succeeded.
        """
        if not self.compares_replicas or self.world_size == 1 or self.module is None:
            return
        ignored = set(self.parameters_to_ignore())
        parts = [
            (name, *self.part_of(parameter))
            for name, parameter in self.module.named_parameters()
            if name not in ignored and not parameter.is_meta and not is_lazy(parameter)
        ]
        with self.guard("comparison of the replicas"):
            difference = find_difference(parts)
        if difference:
            self.restore_module()
            raise DistributedError(difference)

    @property
    def automatic_optimization(self) -> bool:
        """True unless the module steps its optimizers itself, by ``automatic_optimization = False``.

        .. versionadded:: 0.2
        """
        return bool(getattr(self.module, "automatic_optimization", True))

    def parameters_to_ignore(self) -> Collection[str]:
        """Return names of the parameters that each rank trains by itself; :meth:`check_replicas` leaves them out."""
        return ()

    def part_of(self, parameter: nn.Parameter) -> tuple[Any, torch.Tensor]:
        """Return an identifier of this rank's part of ``parameter``, and the part.

        The identifier has the same ``repr`` on every rank with this part, and on no other.
        """
        return None, parameter

    # -- manual optimization and state -----------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        # Buffers such as a batch norm's statistics follow each rank's own data: rank 0's are the model's. They go into
        # copies, as saving must not change a run.
        assert self.module is not None
        state = super().module_state_dict()
        if self.world_size > 1:
            names = sorted(name for name, _ in self.module.named_buffers(remove_duplicate=False) if name in state)
            with self.guard("broadcast of the buffers"):
                state.update(collectives.broadcast_copies({name: state[name] for name in names}))
        return state

    def module_step(self, name: str) -> Callable[..., Any]:
        step: Callable[..., Any] = getattr(self.module, name)
        if name != "training_step" or self.model is self.module:
            return step
        if not self.automatic_optimization:
            return step  # each manual_backward averages explicitly: its backward passes run inside the step
        return forward_through(self, self.module, step)

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        if not training or self.model is self.module or not self.automatic_optimization:
            return forward
        return around_call(forward, lambda call: forward_through(self, self.module, call))

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.backward(loss, *args, **kwargs)
        self.sync_gradients()
