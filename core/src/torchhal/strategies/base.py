"""The strategy contract: one accelerator, one precision, one checkpoint IO and perhaps a cluster environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from torchhal._overrides import overrides
from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.distributed._rank_monitor import RankMonitor
from torchhal.distributed.rendezvous import DEFAULT_TIMEOUT
from torchhal.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    ModelError,
    UnsupportedCombinationError,
)
from torchhal.launchers import ExternalLauncher, Launcher
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.precision import Precision
from torchhal.precision.base import connected, dense_gradient
from torchhal.pytree import move_module
from torchhal.strategies._forward_through import forward_through
from torchhal.strategies._optimizer_state import check_groups, check_optimizer_state, check_scheduler_state
from torchhal.strategies._sync_batchnorm import (
    check_sync_batchnorm_layers,
    restore_batchnorms,
    synchronize_batchnorms,
)

_Part = TypeVar("_Part")

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Strategy(ABC):
    """How a model is trained on the devices it was given.

    A strategy owns the model, the optimizers and the schedulers, and is the only thing the loops speak to. One
    life, on every rank, in this order::

        make_launcher                           in the process that calls fit
          setup_environment                     device current, communication up, ranks known
          connect(module)
          setup(trainer) -> setup_model, setup_optimizers
          step_function / backward / clip_gradients / optimizer_step ...
          save_checkpoint, load_checkpoint
        teardown                                always, after errors too; then the same object may start again

    A subclass overrides the few of these that differ. :meth:`setup` may be overridden without calling the
    inherited one: what it left undone is done when it returns. Before :meth:`setup_environment` no method
    communicates (STR-38).
    """

    alias: str = ""
    """The name this strategy was asked for by; empty for an object the user made."""

    features: ClassVar[frozenset[str]] = frozenset()
    """What the loops leave to the strategy.

    ``owns_step``: :meth:`step_function` trains on a batch completely; the loops only count.
    ``owns_backward``: it ends with the gradients in place; the loops clear them before and step after it.
    ``owns_accumulation``: :meth:`backward` and :meth:`optimizer_step` run for every batch, and the latter answers
    None until it steps; the loops never clear gradients.
    ``owns_closure``: a closure goes to :meth:`optimizer_step` unevaluated.
    ``owns_clipping``: with :attr:`gradient_clip_val`, set before :meth:`setup`.
    ``owns_schedulers``: their ``step`` is not called.
    """

    multi_device: ClassVar[bool] = False
    """Whether more than one device makes sense; several for a strategy of one is refused before launch."""

    accelerators: ClassVar[frozenset[str] | None] = None
    """Names of the accelerators this strategy works on; None: every one that torch speaks to (STR-37)."""

    precisions: ClassVar[frozenset[str] | None] = None
    """Aliases of the precisions this strategy works with; None: every one (STR-36, STR-37)."""

    default_checkpoint_io: ClassVar[str] = "torch"
    """Alias of the checkpoint IO that is used when none is named; an engine that writes its own files names its own."""

    inference_mode: ClassVar[bool] = True
    """Whether steps without training may run in torch's inference mode; False for a strategy that makes buffers in
    them which training writes to."""

    evaluation_communicates: ClassVar[bool] = False
    """Whether the forward of a step without training communicates, as one that gathers parameters does. Ranks may have
    different numbers of batches: where only some have one, all of them enter :meth:`evaluation_step_of`."""

    steps_per_batch: int | None = None
    """Optimizer steps that one batch of the training loader makes, known after :meth:`setup_model`, where a batch is
    several, as a loader from :meth:`process_dataloader` may give them; None: ``accumulate_grad_batches`` make one."""

    timeout: timedelta = DEFAULT_TIMEOUT
    """How long whatever waits for other ranks does so: to meet them, in a barrier, in a collective. Ten minutes by
    default."""

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        precision: Precision | None = None,
        precision_plugin: Precision | None = None,
        checkpoint_io: CheckpointIO | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        """Parts left None are chosen by ``resolve``. ``precision_plugin`` is another word for ``precision``."""
        if precision is not None and precision_plugin is not None and precision is not precision_plugin:
            raise ConfigurationError("'precision' and 'precision_plugin' are one argument: give one of them (got both)")
        for name, value, base in (
            ("accelerator", accelerator, Accelerator),
            ("precision", precision or precision_plugin, Precision),
            ("checkpoint_io", checkpoint_io, CheckpointIO),
            ("cluster_environment", cluster_environment, ClusterEnvironment),
        ):
            if value is not None and not isinstance(value, base):
                raise TypeError(f"'{name}' must be an instance of {base.__name__} (got {value!r})")
        self.given: dict[str, Any] = {
            "accelerator": accelerator,
            "precision": precision or precision_plugin,
            "checkpoint_io": checkpoint_io,
            "cluster_environment": cluster_environment,
        }
        """The parts that the user chose, by kind; what ``resolve`` chose for one run is not among them."""
        self._accelerator = accelerator
        self._precision = precision or precision_plugin
        self._checkpoint_io = checkpoint_io
        self.cluster_environment = cluster_environment
        self.devices: list[torch.device] = []
        self.num_nodes = 1
        self.left_to_launcher: frozenset[str] = frozenset()
        """``devices`` or ``num_nodes``, where they are "auto" and known when the ranks have met."""
        self._reset()

    def _reset(self) -> None:
        self.module: nn.Module | None = None
        self.model: Any = None
        self.model_is_connected = False
        """Whether :attr:`model` is a wrapper that the precision's ``connect`` gave."""
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self._watch: RankMonitor | None = None
        self.accumulate_grad_batches = 1
        self.gradient_clip_val: float | None = None
        self.gradient_clip_algorithm = "norm"
        self.sync_batchnorm = False
        """Whether the batch norms of a training compute over the batches of all ranks; set before :meth:`connect`."""
        self._synchronized: list[nn.Module] = []
        self._environment_ready = False
        self.trainer: Any = None
        """The Trainer that runs this strategy, from :meth:`prepare` to :meth:`teardown`; None in a loop by hand."""
        self.mark_step: Callable[[], None] | None = None
        """The accelerator's ``step_marker()``, between the set-up and the teardown."""

    # -- composition -----------------------------------------------------------------------------------------

    def configure(
        self,
        *,
        accelerator: Accelerator,
        precision: Precision,
        checkpoint_io: CheckpointIO,
        cluster_environment: ClusterEnvironment | None,
        devices: Sequence[torch.device],
        num_nodes: int,
    ) -> None:
        """Take the parts that ``resolve`` chose. Starts nothing; called once, before :meth:`make_launcher`."""
        self._accelerator = accelerator
        self._precision = precision
        self._checkpoint_io = checkpoint_io
        self.cluster_environment = cluster_environment
        self.devices = list(devices)
        self.num_nodes = num_nodes

    def check_fit(self, *, precision: Precision, world_size: int) -> None:
        """Raise ConfigurationError if this can't work in that precision, or over that many processes.

        Called by ``resolve``, before anything is started, with all other parts chosen.
        """

    def check_sync_batchnorm(self, world_size: int) -> None:
        """Raise UnsupportedCombinationError if batch norms can't compute over the batches of all ranks.

        Called before anything is started, for ``Trainer(sync_batchnorm=True)``. A strategy whose ranks run the module
        itself, each on samples of its own, passes and gives their :meth:`batch_group`.
        """
        raise UnsupportedCombinationError(
            f"strategy {self.alias or type(self).__name__!r} can't let batch norms compute over the batches of all "
            "ranks (sync_batchnorm=True): use one that has a replica in each process, such as 'ddp', or leave "
            "sync_batchnorm out"
        )

    def batch_group(self) -> Any:
        """The process group of the ranks that see the samples of one batch, each its own; None where that is this one
        alone. Asked after :meth:`setup_environment`."""
        return None

    @property
    def is_set_up(self) -> bool:
        """Whether this process is between :meth:`setup_environment` and :meth:`teardown`."""
        return self._environment_ready

    @property
    def accelerator(self) -> Accelerator:
        return self._part(self._accelerator, "accelerator")

    @property
    def precision(self) -> Precision:
        return self._part(self._precision, "precision")

    @property
    def precision_plugin(self) -> Precision:
        """Another word for :attr:`precision`."""
        return self.precision

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return self._part(self._checkpoint_io, "checkpoint_io")

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = self.given["checkpoint_io"] = io

    def _part(self, part: _Part | None, name: str) -> _Part:
        if part is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no {name} yet: give it to the constructor, or the strategy to a Trainer"
            )
        return part

    @property
    def watch(self) -> RankMonitor:
        """What this process knows of the others' failures and wishes to stop; of itself alone before the set-up."""
        if self._watch is None:
            self._watch = RankMonitor(None, 0, 1)
        return self._watch

    # -- processes and ranks ---------------------------------------------------------------------------------

    def num_local_processes(self, num_devices: int) -> int:
        """Processes per node for ``num_devices`` devices: one for each unless a process drives several."""
        return 1

    def make_launcher(self) -> Launcher:
        """What starts this strategy's processes. The default starts none."""
        return ExternalLauncher()

    @property
    def root_device(self) -> torch.device:
        """The device of this process (STR-27)."""
        if not self.devices:
            raise ConfigurationError(
                f"{type(self).__name__} has no devices yet: give it to a Trainer, or call configure()"
            )
        return self.devices[0]

    @property
    def global_rank(self) -> int:
        return 0

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def is_global_zero(self) -> bool:
        """True on exactly one process, before and after :meth:`setup_environment` (STR-12)."""
        return self.global_rank == 0

    @property
    def is_data_leader(self) -> bool:
        """True on exactly one of the ranks that see the same samples: its metrics and predictions count.

        Ranks that share one batch, as in tensor or pipeline parallelism, would count it several times otherwise. Where
        a step does not end on rank 0, as in a pipeline, rank 0 shows the values that the first leader logged. Asked
        once, after :meth:`setup_model`.
        """
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """``num_replicas`` and ``rank`` for a sampler, or None where every process sees all data (STR-28)."""
        return None

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Select the device and bring up communication. Idempotent within one life."""
        if self._environment_ready:
            return
        self.accelerator.setup_device(self.root_device)
        self.mark_step = self.accelerator.step_marker()
        self.precision.setup(self.accelerator, self.root_device)
        store = self.setup_communication()
        if store is not None:
            self._watch_ranks(store)
        self._environment_ready = True

    def _watch_ranks(self, store: Store) -> None:
        """Start :attr:`watch`, once in a life: before the ranks wait for each other in C, if they do in a set-up."""
        if self._watch is None or self._watch.world_size == 1:
            self._watch = RankMonitor(store, self.global_rank, self.world_size).start()

    def setup_communication(self) -> Store | None:
        """Let the ranks find each other; the store through which they tell of failures and wishes to stop.

        None for a world of one. A strategy with an initialisation of its own returns the store of that.
        """
        return None

    def init_context(self) -> AbstractContextManager[Any]:
        """Entered while ``configure_model`` builds parameters: the precision's dtype; sharded strategies add theirs."""
        return self.precision.module_init_context()

    def connect(self, module: nn.Module) -> None:
        """Take the user's module: ``module`` from now on, and ``model`` until :meth:`setup_model` wraps it."""
        restore_batchnorms(self._synchronized)
        self._synchronized = []
        self.module = module
        self.model = module
        self.model_is_connected = False
        if self.is_set_up and (group := self.batch_group()) is not None:
            check_sync_batchnorm_layers(module, self.root_device)
            if self.sync_batchnorm:
                self._synchronized = synchronize_batchnorms(module, group)

    def prepare(self, trainer: Any) -> None:
        """Run :meth:`setup` and finish what an override of it left out. Called by the Trainer; not for overriding."""
        self.trainer = trainer
        self.accelerator.setup(trainer)
        done: set[str] = set()
        with self._recorded("setup_model", done), self._recorded("setup_optimizers", done):
            self.setup(trainer)
        training = trainer.state.fn == "fit"
        if "setup_model" not in done:
            self.setup_model(training=training)
        if training and "setup_optimizers" not in done:
            self.setup_optimizers(*trainer.configure_optimizers())

    @contextmanager
    def _recorded(self, name: str, done: set[str]) -> Iterator[None]:
        """While entered, a finished call of the method ``name``, whoever overrides it, is noted in ``done``."""
        method = getattr(self, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            done.add(name)
            return result

        before = vars(self).get(name)
        vars(self)[name] = call
        try:
            yield
        finally:
            if before is None:
                del vars(self)[name]
            else:
                vars(self)[name] = before

    def setup(self, trainer: Any) -> None:
        """Make model and optimizers ready, in this order. An override may do more, or only some of it."""
        self.setup_model(training=trainer.state.fn == "fit")
        if trainer.state.fn == "fit":
            self.setup_optimizers(*trainer.configure_optimizers())

    def setup_model(self, *, training: bool = True) -> None:
        """Convert the module to the precision, move it to the device and, for training, wrap it."""
        assert self.module is not None, "connect() comes first"
        self.module = self.model = self.precision.convert_module(self.module)
        self.model_to_device()
        self.sync_module(self.module)
        self.wrap_model(training=training)

    def model_to_device(self) -> None:
        """Move the module's parameters and buffers to :attr:`root_device`."""
        assert self.module is not None
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        if self.root_device.type != "meta" and (empty := [name for name, tensor in tensors if tensor.is_meta]):
            raise ModelError(
                f"{', '.join(map(repr, empty[:3]))}{' and others' if len(empty) > 3 else ''} of "
                f"{type(self.module).__name__} lie on the meta device and have no values that {type(self).__name__} "
                "could move: build them in configure_model, or without torch.device('meta')"
            )
        move_module(self.module, self.root_device)

    def begin_epoch(self) -> None:
        """Called before the first batch of each training epoch, after the hooks: what they froze or unfroze, a
        strategy that looked at it when it wrapped the model sees here. Nothing by default."""

    def sync_module(self, module: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0 (STR-13, STR-47)."""

    def wrap_model(self, *, training: bool) -> None:
        """Set ``self.model`` to whatever the steps must go through. Nothing by default.

        ``training`` is False for validate, test and predict without a fit: data parallel needs no wrapper then, a
        model too large for one device does.
        """

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        """Take the optimizers over the module's parameters; a subclass may replace them (STR-16).

        :attr:`optimizers` and :attr:`lr_scheduler_configs` are what the precision's ``connect`` has made of them, and
        so is :attr:`model`.
        """
        for optimizer in optimizers:
            self.precision.check_optimizer(optimizer)
        given = (self.model, list(optimizers), list(lr_scheduler_configs))
        model, self.optimizers, self.lr_scheduler_configs = connected(self.precision, *given)
        if model is not self.model:
            self._take_connected(model)

    def _take_connected(self, model: Any) -> None:
        """Go on with a model that the precision has put in the place of :attr:`model`, or around it."""
        if self.model is self.module and callable(getattr(model, "training_step", None)):
            self.module = self.model = model
        elif isinstance(model, nn.Module) and any(part is self.module for part in model.modules()):
            self.model = model
            self.model_is_connected = True
        else:
            name = type(self.precision).__name__
            raise ConfigurationError(
                f"{name}.connect must return the model, one in its place with a training_step, or a module that holds "
                f"it (got {type(model).__name__})"
            )

    def check_replicas(self) -> None:
        """Raise DistributedError, on every rank alike, where replicas of the model have come apart.

        Called once, on every rank, when a fit has made its last step. Nothing by default: there is one model.
        """

    def restore_module(self) -> None:
        """Make the user's module whole and unwrapped on every rank, for whatever the program does with it next.

        Called on every rank after a run that succeeded, while the ranks are still together.
        """

    def teardown(self) -> None:
        """Give back model, device and communication. Idempotent, legal at any time (STR-29, STR-30).

        Each part is torn down even when another one fails; the first error is raised at the end.
        """
        with ExitStack() as stack:  # runs in reverse: model, IO, precision, environment, accelerator
            if self._accelerator is not None:
                stack.callback(self._accelerator.teardown)
            if self.cluster_environment is not None:
                stack.callback(self.cluster_environment.teardown)
            if self._precision is not None:
                stack.callback(self._precision.teardown)
            if self._checkpoint_io is not None:
                stack.callback(self._checkpoint_io.teardown)
            stack.callback(self._release_model)

    def _release_model(self) -> None:
        restore_batchnorms(self._synchronized)
        self._synchronized = []
        self.model = self.module
        self.model_is_connected = False
        self.trainer = None
        self._watch = None
        self._environment_ready = False
        self.mark_step = None
        if self.module is not None and self.devices and self.root_device.type != "cpu":
            move_module(self.module, torch.device("cpu"))
            for optimizer in self.optimizers:
                _optimizer_state_to(optimizer, torch.device("cpu"))

    def explain(self, error: BaseException) -> BaseException:
        """A clearer error for one that came out of a step, or ``error`` itself; called once, when a run fails."""
        return error

    # -- steps -----------------------------------------------------------------------------------------------

    def step_function(self, name: str) -> Callable[..., Any]:
        """The callable that runs one of :data:`STEPS` with everything decided: wrapper, precision, overrides.

        The loops ask once and call the result for every batch with the arguments of the module's own step. A
        subclass that defines a method of that name (``training_step(self, *args)``) has it called instead.
        """
        own = getattr(self, name, None)
        if own is not None:
            return own  # type: ignore[no-any-return]
        return self.marked(name, self.with_precision(self.module_step(name)))

    def marked(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, one of :data:`STEPS`, with the marks that it needs beside those of backward and optimizer_step."""
        mark = self.mark_step
        automatic = getattr(self.module, "automatic_optimization", True) and bool(self.optimizers)
        if mark is None or (name == "training_step" and automatic):  # marked where its work is complete
            return step

        def and_mark(*args: Any) -> Any:
            output = step(*args)
            mark()
            return output

        return and_mark

    def module_step(self, name: str) -> Callable[..., Any]:
        """The module's step, through ``self.model`` where that wraps it."""
        step: Callable[..., Any] = getattr(self.module, name)
        automatic = getattr(self.module, "automatic_optimization", True)
        if name != "training_step" or not self.model_is_connected or not automatic:
            return step
        return forward_through(self, self.module, step)

    def with_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function(batch, *rest)`` under the precision: input converted, forward context, output converted."""
        precision = self.precision
        forward_context = precision.forward_context if overrides(precision, Precision, "forward_context") else None
        convert_input = precision.convert_input if overrides(precision, Precision, "convert_input") else None
        convert_output = precision.convert_output if overrides(precision, Precision, "convert_output") else None
        if convert_input is None and forward_context is None and convert_output is None:
            return function

        def step(batch: Any, *rest: Any) -> Any:
            if convert_input is not None:
                batch = convert_input(batch)
            if forward_context is None:
                output = function(batch, *rest)
            else:
                with forward_context():
                    output = function(batch, *rest)
            return output if convert_output is None else convert_output(output)

        return step

    def evaluation_step_of(self, ranks: Collection[int]) -> AbstractContextManager[Any]:
        """Around one step of an evaluation for which only ``ranks`` have a batch: they run it inside.

        The others enter it with nothing inside, and take their part there in what the step sends. Called on every rank
        if :attr:`evaluation_communicates`, and never otherwise.
        """
        return nullcontext()

    def check_accumulation(self, batches: int) -> None:
        """Raise ConfigurationError where an optimizer step can't take so many batches; asked before the Trainer takes
        another number than ``accumulate_grad_batches`` to keep the global batch of a run on fewer or more processes."""

    def process_dataloader(self, loader: Any, *, training: bool) -> Any:
        """The loader the loops iterate: a vendor's own around the user's, say. The same loader by default."""
        return loader

    def batch_to_device(self, batch: Any) -> Any:
        """The batch on this process's device; from pinned memory without waiting for it."""
        return self.accelerator.batch_to_device(batch, self.root_device, non_blocking=True)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients before the first backward of a step. Not called under ``owns_accumulation``."""
        optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradients of ``loss``, synchronised between ranks unless under :meth:`no_backward_sync`."""
        self.precision.backward(loss, *args, **kwargs)
        if self.mark_step is not None:
            self.mark_step()

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """:meth:`backward` for a module that steps its optimizers itself (STR-19)."""
        self.backward(loss, *args, **kwargs)

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        """A context for forward and backward of all but the last micro-batch, or None where there is nothing to
        switch off (STR-15). Asked once before the loop; the context is entered many times."""
        return None

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Bring the gradients to true size, once per step; before hooks that look at them."""
        self.precision.unscale_gradients(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Clip by the global norm, over all shards, or by value; see ``Precision.clip_gradients`` (STR-35)."""
        self.unscale_gradients(optimizer)
        return self.precision.clip_gradients(optimizer, clip_val, algorithm)

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        """The 2-norm over all gradients of ``optimizer``, on whichever ranks they are: 0-d, unscaled, nothing changed.

        For hooks between the last backward and the step, on every rank. Where ranks have different parameters, or parts
        of them, as in a pipeline, ``torch.nn.utils.get_total_norm`` sees this rank's alone.
        """
        self.unscale_gradients(optimizer)
        parameters = [parameter for parameter in self.precision.main_params(optimizer) if parameter.grad is not None]
        return nn.utils.get_total_norm([dense_gradient(parameter) for parameter in parameters])

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> int | None:
        """Step. True if parameters were updated, False if the step was skipped (an overflow: schedulers wait), None
        if none was due yet (it doesn't count), a number above 1 if the model is now so many steps further: the state
        of others, who were ahead, was taken over."""
        stepped = self.precision.optimizer_step(optimizer, closure)
        if self.mark_step is not None:
            self.mark_step()
        return stepped

    # -- communication ---------------------------------------------------------------------------------------

    @abstractmethod
    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        """``value`` combined over all ranks; the input is left as it was (STR-01 to STR-04, STR-45, STR-46).

        Args:
            value: a dense tensor of any dtype and strides, a number, or a nest of them with the same structure on
                every rank; the keys of a mapping may come in any order. Anything else is returned as it is.
            op: ``"mean"`` (also ``"avg"``), ``"sum"``, ``"min"``, ``"max"``, ``"product"``.
            group: a process group; None for all ranks.

        Returns:
            New tensors on :attr:`root_device`, in their own dtype but for two: a mean of integers or booleans is of
            the default dtype, a sum or product of them int64. A number stays a number of its type, its mean a float.

        Raises:
            DistributedError: on every rank alike, when they brought different structures, types, dtypes or shapes.
        """

    @abstractmethod
    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Rank ``src``'s value, a tensor or any picklable object, on every rank (STR-06, STR-07).

        A tensor that lay on rank ``src``'s device arrives on this rank's, one on its CPU on this one's.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, *, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Shape (...) on each rank to shape (world_size, ...) in rank order, on every rank (STR-09 to STR-11).

        With ``sync_grads``, backward adds up what the losses of all ranks say about this rank's tensor. Different
        shapes or dtypes raise DistributedError on every rank alike.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank."""

    @abstractmethod
    def barrier(self, name: str = "") -> None:
        """Wait for all ranks; an error naming the missing ones when the timeout is over (STR-08)."""

    def reduce_boolean_decision(self, decision: bool, *, all: bool = True) -> bool:
        """Whether all ranks (or any, with ``all=False``) decided so; the same answer on each (STR-05)."""
        return bool(self.reduce(int(decision), "min" if all else "max"))

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        """Bytes of ``model``, on the meta device, on the rank that needs most. Everything on every rank by default.

        Called before anything is set up; a strategy that divides parameters, gradients or state says how.
        """
        return model.estimate()

    # -- state and checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the strategy itself, beside all that has a method below: plain data. Called on
        every rank; rank 0's is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, of another strategy too: a key that this one doesn't know is left alone.

        Called on every rank, after the set-up.
        """

    def module_state_dict(self) -> dict[str, Any]:
        """The module's state with the user's own key names, no wrapper's prefix (STR-21). Called on every rank.

        Whole on rank 0. On a rank that writes no checkpoint the tensors may be on the meta device, without values.
        """
        assert self.module is not None
        return self.module.state_dict()

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load into the module, wrapped or not; CheckpointMismatchError names the keys and shapes that differ."""
        assert self.module is not None
        try:
            return self.module.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(self.module).__name__}: {error}"
            ) from error

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's whole state. Called on every rank; rank 0's result is saved."""
        return optimizer.state_dict()

    def scheduler_state(self, config: Any) -> dict[str, Any]:
        """The state of one scheduler; an engine that owns them gives its own."""
        state: dict[str, Any] = config.scheduler.state_dict()
        return state

    def check_scheduler_state(self, config: Any, state: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatchError where a value of ``state`` can't be this scheduler's; change nothing.

        Called on every rank before anything of a checkpoint is restored. An engine that gives a
        :meth:`scheduler_state` of its own checks that.
        """
        check_scheduler_state(config.scheduler, state)

    def load_scheduler_state(self, config: Any, state: dict[str, Any]) -> None:
        """Continue from :meth:`scheduler_state`."""
        self.check_scheduler_state(config, state)
        config.scheduler.load_state_dict(state)

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatchError where ``state`` can't be this optimizer's; change nothing.

        Called on every rank before anything of a checkpoint is restored. Tensors that ``open_checkpoint`` of a sharded
        checkpoint IO stands in for are known by their shapes and are not read. An engine whose :meth:`optimizer_state`
        isn't of torch's form, with ``param_groups``, checks its own.
        """
        if "param_groups" in state or not overrides(self, Strategy, "load_optimizer_state"):
            check_optimizer_state(optimizer, state)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Continue from :meth:`optimizer_state`, with tensors on the parameters' device (STR-26)."""
        names = [frozenset(group) for group in optimizer.param_groups]
        try:
            self.check_optimizer_state(optimizer, state)
            optimizer.load_state_dict(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointMismatchError(
                f"the optimizer state doesn't belong to this {type(optimizer).__name__}: {error}"
            ) from error
        check_groups(optimizer, names)

    def sync_gradients(self) -> None:
        """Average over the ranks what was accumulated under :meth:`no_backward_sync`."""

    def accumulated_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of an accumulation that has not stepped yet, by parameter name, for a checkpoint in its midst.
        Called on every rank; afterwards all ranks hold what rank 0 saves."""
        assert self.module is not None
        self.sync_gradients()  # averaged now, the rest of the accumulation adds up to the same on every rank
        return {
            name: parameter.grad.detach().cpu()
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }

    def load_accumulated_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Continue an accumulation from :meth:`accumulated_gradients`."""
        assert self.module is not None
        for name, parameter in self.module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write through the checkpoint IO. Called on every rank; returns, or raises, on all of them alike (CIO-23).

        An IO without the feature ``sharded`` runs on rank 0 only.
        """
        error: BaseException | None = None
        if self.world_size > 1 and "sharded" in self.checkpoint_io.features:
            # shards that lie in several folders look like a checkpoint in each of them
            paths = self.all_gather_object(path)
            if len(set(paths)) > 1:
                raise CheckpointError(f"every rank must save to the same path (got {', '.join(map(repr, paths))})")
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            try:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            except Exception as raised:
                error = raised
        self._raise_alike(error, f"checkpoint {path!r} was not written")

    def wait_for_checkpoints(self) -> None:
        """Return when every save is durable. Called on every rank; raises what a save met on all of them alike."""
        error: BaseException | None = None
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            try:
                self.checkpoint_io.wait()
            except Exception as raised:
                error = raised
        if "async" in self.checkpoint_io.features:
            self._raise_alike(error, "a checkpoint was not written")
        elif error is not None:
            raise error

    def _raise_alike(self, error: BaseException | None, what: str) -> None:
        if self.world_size > 1:
            failures = self.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
            others = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
            if error is None and others:
                raise CheckpointError(f"{what}: {'; '.join(others)}")
        if error is not None:
            raise error

    def load_checkpoint(self, path: str, *, weights_only: bool = True) -> dict[str, Any]:
        """Read through the checkpoint IO, to the CPU. Called on every rank."""
        return self.checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)

    def remove_checkpoint(self, path: str) -> None:
        """Remove what :meth:`save_checkpoint` wrote. Called on every rank; returns, or raises, on all of them alike.

        Rank 0 acts unless the IO is sharded.
        """
        error: BaseException | None = None
        if self.is_global_zero or "sharded" in self.checkpoint_io.features:
            try:
                self.checkpoint_io.remove_checkpoint(path)
            except Exception as raised:
                error = raised
        self._raise_alike(error, f"checkpoint {path!r} was not removed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.alias!r})" if self.alias else f"{type(self).__name__}()"


def _optimizer_state_to(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to(device)
