"""Define the strategy contract: how a model is trained on its devices, by one or by several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from torchhal.composition import Composable, Composition, takes_parts_too
from torchhal.distributed._rank_monitor import RankMonitor
from torchhal.distributed.rendezvous import DEFAULT_TIMEOUT
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.launchers import ExternalLauncher, Launcher
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.precision.base import connected
from torchhal.pytree import move_module
from torchhal.step_memory import MemoryByPhase, StepMemory, TrainingStep, phases_of
from torchhal.strategies._carried_precisions import CarriedPrecisions
from torchhal.strategies._hooks import StrategyHooks
from torchhal.strategies._optimizer_state import move_optimizer_state
from torchhal.strategies._optimizer_state_dtypes import converting_step
from torchhal.strategies._state import StrategyState
from torchhal.strategies._steps import STEPS, StrategySteps
from torchhal.strategies._sync_batchnorm import (
    check_sync_batchnorm_layers,
    restore_batchnorms,
    synchronize_batchnorms,
)

__all__ = ["STEPS", "Strategy"]


class Strategy(Composable, CarriedPrecisions, StrategyHooks, StrategySteps, StrategyState):
    """One way to train a model on the devices it is given.

    A strategy owns the model, the optimizers and the schedulers, and is the only object that the loops call. The life
    of one run, on every rank, in this order::

        make_launcher                           in the process that calls fit
          setup_environment                     device current, communication up, ranks known
          connect(module)
          setup(trainer) -> setup_model, setup_optimizers
          on_train_start ... on_train_end       the hooks of the loops' phases, of which all bodies are empty
          step_function / backward / clip_gradients / optimizer_step ...
          save_checkpoint, load_checkpoint
        teardown                                always, after errors too; then the same object may start again

    A subclass overrides the few of these that differ. :meth:`setup` may be overridden without calling the inherited
    one: what it left undone is done when it returns. Before :meth:`setup_environment` no method communicates.

    Checks: STR-31 to STR-34, STR-38, STR-40, STR-42 to STR-44, STR-48.
    """

    features: ClassVar[frozenset[str]] = frozenset()
    """Tasks that the loops leave to the strategy.

    * ``"owns_step"``: :meth:`step_function` trains on a batch completely; the loops only count.
    * ``"owns_backward"``: it ends with the gradients in place; the loops clear them before and step after it.
    * ``"owns_accumulation"``: :meth:`backward` and :meth:`optimizer_step` run for every batch, and the latter returns
      :attr:`.StepResult.NOT_DUE` until it steps; the loops never clear gradients.
    * ``"owns_closure"``: a closure is passed to :meth:`optimizer_step` unevaluated.
    * ``"owns_clipping"``: it clips with :attr:`gradient_clip_val`, set before :meth:`setup`.
    * ``"owns_schedulers"``: their ``step`` is not called.
    * ``"owns_optimizer_state"``: it stores the optimizer's state by rules of its own, so a precision that overrides
      :meth:`.Precision.optimizer_state_dtype` is refused before launch.

    ``"lossy"`` is no task: the steps differ from those of one process by up to :attr:`tolerances`, as gradients are
    compressed, or averaged in part.
    """

    multi_device: ClassVar[bool] = False
    """True if more than one device makes sense; several for a strategy of one are refused before launch."""

    accelerators: ClassVar[frozenset[str] | None] = None
    """Names of the accelerators this strategy works on; None: every one that torch supports.

    Checks: STR-37.
    """

    default_checkpoint_io: ClassVar[str] = "torch"
    """Alias of the checkpoint IO that is used when none is named; an engine that writes its own files names its own."""

    inference_mode: ClassVar[bool] = True
    """True if steps without training may run in torch's inference mode.

    False for a strategy that creates buffers in them which training writes to.
    """

    evaluation_communicates: ClassVar[bool] = False
    """True if the forward of a step without training communicates, as one that gathers parameters does.

    Ranks may have different numbers of batches: where only some have one, all of them enter :meth:`evaluation_step_of`.

    Checks: STR-94.
    """

    needs_trainer: ClassVar[str] = ""
    """Why only the Trainer can drive this strategy; "" where a loop of the user's own can, with :class:`torchhal.Run`.

    A sentence's end that follows "strategy 'x' ", such as ``"starts its replicas in the Trainer's epochs"``.

    .. versionadded:: 0.2
    """

    steps_per_batch: int | None = None
    """Number of optimizer steps per batch of the training loader, known after :meth:`setup_model`.

    For a loader from :meth:`process_dataloader` whose batch is several; None: ``accumulate_grad_batches`` make one
    step.
    """

    timeout: timedelta = DEFAULT_TIMEOUT
    """The longest wait for other ranks: to meet them, in a barrier, in a collective. Ten minutes by default."""

    def num_local_processes(self, num_devices: int) -> int:
        """Return the number of processes per node: one for each device unless a process drives several.

        Called before anything is started.

        Args:
            num_devices: number of devices per node.
        """
        return 1

    def make_launcher(self) -> Launcher:
        """Return the launcher of this strategy's processes; the default starts none.

        Called once in the process that calls fit, after :meth:`configure`.
        """
        return ExternalLauncher()

    @takes_parts_too
    def check_fit(self, composition: Composition) -> None:
        """Raise an error if the strategy can't work in ``composition``: with that precision, or as many processes.

        A class of an earlier release takes ``precision`` and ``world_size``, by keyword, and is still called with these
        until torchhal 1.0.

        Args:
            composition: the components, this one among them, and the processes.

        Raises:
            ConfigurationError: it can't.

        Checks: STR-37, GEN-32.
        """

    def check_sync_batchnorm(self, world_size: int) -> None:
        """Raise an error if batch norms can't compute over the batches of all ranks.

        Called before anything is started, for ``Trainer(sync_batchnorm=True)``. A strategy whose ranks run the module
        itself, each on samples of its own, accepts it and returns their :meth:`batch_group`.

        Args:
            world_size: number of processes of the job.

        Raises:
            UnsupportedCombinationError: they can't.

        Checks: STR-57.
        """
        raise UnsupportedCombinationError(
            f"strategy {self.display_name!r} can't let batch norms compute over the batches of all "
            "ranks (sync_batchnorm=True): use one that has a replica in each process, such as 'ddp', or leave "
            "sync_batchnorm out"
        )

    def batch_group(self) -> Any:
        """Return the process group of the ranks that have different samples of one batch, or None for this rank alone.

        Called on every rank after :meth:`setup_environment`.

        Checks: STR-57.
        """
        return None

    def parameter_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape that a parameter has in the whole model: its own by default.

        To be overridden where :meth:`init_context` lets ``configure_model`` create parts of parameters.

        Args:
            parameter: one of the module that :meth:`connect` will take.

        .. versionadded:: 0.2
        """
        return parameter.shape

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        """Return the bytes of ``model`` on the rank that needs most; everything on every rank by default.

        Called before anything is set up; a strategy that divides parameters, gradients or state divides them here.

        Args:
            model: sizes of a model on the meta device.
            world_size: number of processes of the job.
        """
        return model.estimate()

    def step_memory(self, step: TrainingStep, world_size: int) -> StepMemory:
        """Return what one training step takes on one device, measured as this strategy computes; whole by default.

        Called before anything is set up, with one rank's batch in ``step``. A strategy that lets a rank compute with
        parts of parameters, or recompute activations, measures it so.

        Args:
            step: measures a step on a copy of the model.
            world_size: number of processes of the job.

        Raises:
            FakeStepError: the step can't run without values.

        .. versionadded:: 0.2
        """
        return step.measure()

    def memory_by_phase(self, step: StepMemory, model: ModelMemory, world_size: int) -> MemoryByPhase:
        """Return the bytes of each phase of a training step on the rank that needs most.

        Called before anything is set up. The default follows from :meth:`memory_per_rank`: the activations are those of
        one device, and the estimate's ``temporary`` lies there in every phase.

        Args:
            step: what :meth:`step_memory` has returned.
            model: sizes of a model on the meta device.
            world_size: number of processes of the job.

        Checks: STR-100.

        .. versionadded:: 0.2
        """
        return phases_of(step, model, self.memory_per_rank(model, world_size), note=self._phases_note())

    def _phases_note(self) -> str:
        """Return a note on phases that nothing but memory_per_rank of another package is known of."""
        derived = [cls for cls in type(self).__mro__ if {"memory_per_rank", "memory_by_phase"} & set(vars(cls))]
        if "memory_by_phase" in vars(derived[0]) or derived[0].__module__.partition(".")[0] == "torchhal":
            return ""
        return "phases follow from memory_per_rank, its temporary bytes counted in each"

    def setup_environment(self) -> None:
        """Select the device and set up communication.

        Called on every rank; idempotent until :meth:`teardown`.

        Raises:
            AcceleratorUnavailableError: the hardware can't be used here.
            DistributedError: the ranks could not connect to each other.

        Checks: STR-30, STR-31, STR-39.
        """
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
        """Start :attr:`watch`, once per set-up, before the ranks wait for each other in C."""
        if self._watch is None or self._watch.world_size == 1:
            self._watch = RankMonitor(store, self.global_rank, self.world_size).start()

    def setup_communication(self) -> Store | None:
        """Connect the ranks with each other.

        Called on every rank by :meth:`setup_environment`.

        Returns:
            The store through which they report failures and requests to stop; None for a world of one. A strategy with
            an initialisation of its own returns the store of that.
        """
        return None

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which ``configure_model`` creates parameters; the precision's by default.

        Entered on every rank.
        """
        return self.precision.module_init_context()

    def connect(self, module: nn.Module) -> None:
        """Take the user's module.

        Called on every rank after :meth:`setup_environment`. It is :attr:`module` from now on, and :attr:`model` until
        :meth:`setup_model` wraps it.

        Args:
            module: the user's module, on any device.

        Checks: STR-21.
        """
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
        """Run :meth:`setup` and complete what an override of it left out.

        Called by the Trainer on every rank; not to be overridden.

        Args:
            trainer: the Trainer of the run.

        Checks: STR-55.
        """
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
        """Add ``name`` to ``done`` when a call of that method, overridden or not, finishes inside the context."""
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
        """Set up the model and the optimizers, in this order.

        Called on every rank. An override may do more, or only a part of it.

        Args:
            trainer: the Trainer of the run.
        """
        self.setup_model(training=trainer.state.fn == "fit")
        if trainer.state.fn == "fit":
            self.setup_optimizers(*trainer.configure_optimizers())

    def setup_model(self, *, training: bool = True) -> None:
        """Convert the module to the precision, move it to the device and, for training, wrap it.

        Called on every rank; afterwards all ranks have the parameters and buffers of rank 0, those that no state dict
        has, too.

        Args:
            training: False for validate, test and predict without a fit.

        Raises:
            ModelError: a parameter or buffer has no values to move.

        Checks: STR-13, STR-41, STR-47, STR-58, STR-61, STR-78, STR-88.
        """
        assert self.module is not None, "connect() comes first"
        self.module = self.model = self.precision.convert_module(self.module)
        self.model_to_device()
        self.sync_module(self.module)
        self.wrap_model(training=training)

    def model_to_device(self) -> None:
        """Move the module's parameters and buffers to :attr:`root_device`.

        Raises:
            ModelError: one of them is on the meta device.

        Checks: STR-41.
        """
        assert self.module is not None
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        if self.root_device.type != "meta" and (empty := [name for name, tensor in tensors if tensor.is_meta]):
            raise ModelError(
                f"{', '.join(map(repr, empty[:3]))}{' and others' if len(empty) > 3 else ''} of "
                f"{type(self.module).__name__} lie on the meta device and have no values that {type(self).__name__} "
                "could move: build them in configure_model, or without torch.device('meta')"
            )
        move_module(self.module, self.root_device)

    def sync_module(self, module: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank.

        Called on every rank.

        Args:
            module: the module on this rank's device; changed in place.

        Checks: STR-13, STR-47.
        """

    def wrap_model(self, *, training: bool) -> None:
        """Set ``self.model`` to the wrapper that the steps must go through; nothing by default.

        Called on every rank.

        Args:
            training: False for validate, test and predict without a fit: data parallel needs no wrapper then, a model
                too large for one device does.
        """

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        """Take the optimizers over the module's parameters; a subclass may replace them.

        Called on every rank, after :meth:`setup_model`. :attr:`optimizers`, :attr:`lr_scheduler_configs` and
        :attr:`model` are what the precision's ``connect`` has made of them.

        Args:
            optimizers: over the parameters of :attr:`module`.
            lr_scheduler_configs: the schedulers of these optimizers.

        Raises:
            TypeError: an optimizer can't work in the precision.
            ConfigurationError: the precision's ``connect`` returns something else than a model, optimizers and
                schedulers.

        Checks: STR-16, STR-67.
        """
        for optimizer in optimizers:
            self.precision.check_optimizer(optimizer)
        self._precision_step = converting_step(self.precision)
        given = (self.model, list(optimizers), list(lr_scheduler_configs))
        model, self.optimizers, self.lr_scheduler_configs = connected(self.precision, *given)
        if model is not self.model:
            self.take_connected(model)

    def take_connected(self, model: Any) -> None:
        """Continue with a model that the precision has returned as a replacement or wrapper of :attr:`model`.

        Called by :meth:`setup_optimizers`, on every rank.

        Args:
            model: what the precision's ``connect`` has returned.

        Raises:
            ConfigurationError: it is neither, or a strategy that drives the model in parts can't use it.
        """
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
        """Raise an error, on every rank, if replicas of the model have diverged.

        Called once, on every rank, when a fit has made its last step. Nothing by default: there is one model.

        Raises:
            DistributedError: replicas differ.

        Checks: STR-56.
        """

    def restore_module(self) -> None:
        """Make the user's module whole and unwrapped on every rank, for later use by the program.

        Called on every rank after a run that succeeded, while the ranks are still connected.
        """

    def teardown(self) -> None:
        """Release the model, the device and the communication.

        Idempotent, legal at any time, called on every rank. The model is on the CPU afterwards. Each component is torn
        down even when another one fails; the first error is raised at the end. A process group that the user has made
        stays, and none that the set-up has made.

        Checks: STR-29 to STR-31, STR-39, STR-62, STR-86.
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
            stack.callback(self.release_model)

    def release_model(self) -> None:
        """Unwrap the module, reset the run's attributes, move the module and its optimizers' state to the CPU.

        Called by :meth:`teardown`, first; an override releases what the run has set up around the module, then calls
        the inherited one.
        """
        restore_batchnorms(self._synchronized)
        self._synchronized = []
        self.model = self.module
        self.model_is_connected = False
        self.trainer = None
        self._watch = None
        self._environment_ready = False
        self.failure = None
        self.mark_step = None
        if self.module is not None and self.devices and self.root_device.type != "cpu":
            if any(tensor.is_meta for tensor in (*self.module.parameters(), *self.module.buffers())):
                # refused by model_to_device, or another rank's: what has no values stays where it is
                self.module._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # type: ignore[no-untyped-call]
            else:
                move_module(self.module, torch.device("cpu"))
            for optimizer in self.optimizers:
                move_optimizer_state(optimizer, torch.device("cpu"))

    def explain(self, error: BaseException) -> BaseException:
        """Return a clearer error for one that a step raised, or ``error`` itself.

        Called once in a process in which a run fails, with what the step raised.

        Checks: STR-59.
        """
        return error
