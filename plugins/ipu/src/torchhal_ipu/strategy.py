"""Run forward, backward and update of a batch on IPUs as one compiled call of poptorch's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchhal.composition import Composition
from torchhal.distributed.process import launched_by
from torchhal.errors import CheckpointMismatchError, ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.strategies import SingleDeviceStrategy, StepResult, Strategy
from torchhal_ipu import _compatibility as compatibility
from torchhal_ipu import _config as options
from torchhal_ipu import _dataloader as dataloader
from torchhal_ipu import _optimizer as device_optimizers
from torchhal_ipu._compiled_step import CompiledStep, flatten, shapes
from torchhal_ipu.precision import IPUMixedPrecision

_log = logging.getLogger("torchhal")

RANDOM_STATE = "ipu_random_state"
"""Key in the optimizer's state in checkpoints: the random numbers of the training executor."""


class IPUStrategy(SingleDeviceStrategy):
    """One process that drives all IPUs of a run; the model is replicated on them.

    A batch of the Trainer is what one call takes: ``device_iterations`` optimizer steps, each of
    ``accumulate_grad_batches`` times as many micro-batches as there are replicas, each of the loader's ``batch_size``.

    Args:
        device_iterations: optimizer steps in one call of the device; None: what ``training_options`` say, or 1.
        ipus_per_replica: IPUs of one copy of the model, whose layers lie on them by ``poptorch.Block``. There are
            ``devices / ipus_per_replica`` replicas.
        training_options: ``poptorch.Options``, for what has no flag; a value that contradicts a flag is refused.
        inference_options: the same for validation, test and prediction.
        cache_dir: folder in which compiled graphs are kept (``enableExecutableCaching``).
        profile_dir: folder for profiles of the device (``enableProfiling``).
        parts: accelerator, precision and checkpoint IO, as in :class:`torchhal.strategies.Strategy`.

    Raises:
        ConfigurationError: a number that can't be.
        TypeError: options of another class.
    """

    features: ClassVar[frozenset[str]] = frozenset(
        {"owns_backward", "owns_accumulation", "owns_clipping", "owns_optimizer_state"}
    )
    multi_device: ClassVar[bool] = True
    accelerators: ClassVar[frozenset[str] | None] = frozenset({"ipu"})
    # backward, scaling of the loss, clipping and update are inside the compiled call
    precision_methods: ClassVar[frozenset[str] | None] = frozenset(
        {
            "setup", "connect", "check_optimizer", "convert_module", "convert_input", "convert_output",
            "module_init_context", "forward_context", "state_dict", "load_state_dict", "rank_state_dict",
            "load_rank_state_dict", "reshard_rank_state", "teardown",
        }
    )  # fmt: skip
    inference_mode: ClassVar[bool] = False  # poptorch writes to weights and buffers when it brings them to the host

    def __init__(
        self,
        *,
        device_iterations: int | None = None,
        ipus_per_replica: int = 1,
        training_options: Any = None,
        inference_options: Any = None,
        cache_dir: str | None = None,
        profile_dir: str | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        for name, count in (("device_iterations", device_iterations), ("ipus_per_replica", ipus_per_replica)):
            optional = name == "device_iterations" and count is None
            if not optional and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise ConfigurationError(f"{name!r} must be an int of at least 1 (got {count!r})")
        self.device_iterations = device_iterations
        self.ipus_per_replica = ipus_per_replica
        self.training_options = training_options
        self.inference_options = inference_options
        self.cache_dir = cache_dir
        self.profile_dir = profile_dir
        self._forget()

    def _forget(self) -> None:
        self._training: CompiledStep | None = None
        self._others: dict[Any, CompiledStep] = {}
        self._current: CompiledStep | None = None
        self._results: Any = None
        self._random_state: list[int] | None = None
        self._frozen: Any = None
        self._dealt = False
        self._sent: list[dict[str, Any]] = []
        self.steps_per_batch = None

    # -- options ---------------------------------------------------------------------------------------------

    def check_fit(self, composition: Composition) -> None:
        if composition.num_nodes is not None and composition.num_nodes > 1:
            raise UnsupportedCombinationError(
                "ipu_strategy drives the IPUs of one machine from one process (got num_nodes="
                f"{composition.num_nodes}): use num_nodes=1"
            )
        environment = composition.cluster_environment
        outside = environment is not None and environment.creates_processes_externally and environment.world_size() > 1
        if outside or launched_by() is not None:
            raise UnsupportedCombinationError(
                "ipu_strategy drives all IPUs from one process, but this is one of several that were started, each of "
                "which would train by itself: start the script once"
            )
        indices = getattr(composition.accelerator, "indices", ())
        if sorted(indices) != list(range(len(indices))):
            raise ConfigurationError(
                f"'devices' must be a number of IPUs (got {list(indices)}): the driver chooses which; for one of its "
                "device ids pass options with useIpuId"
            )
        count = len(composition.devices)
        if count % self.ipus_per_replica:
            raise ConfigurationError(
                f"'devices' must be a multiple of ipus_per_replica={self.ipus_per_replica} (got {count})"
            )

    def _flags(self) -> options.Flags:
        return options.Flags(
            replicas=len(self.devices) // self.ipus_per_replica,
            devices=len(self.devices),
            accumulation=self.accumulate_grad_batches,
            iterations=self.device_iterations,
            cache_dir=self.cache_dir,
            profile_dir=self.profile_dir,
            automatic_loss_scaling=self._loss_scaling == "auto",
        )

    @property
    def _loss_scaling(self) -> float | str | None:
        return self.precision.loss_scaling if isinstance(self.precision, IPUMixedPrecision) else None

    def _training_options(self) -> Any:
        return options.for_training(self.training_options, self._flags())

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        options.check_type("training_options", self.training_options)
        options.check_type("inference_options", self.inference_options)
        self._training_options()
        options.for_inference(self.inference_options, self._flags())

    def setup(self, trainer: Any) -> None:
        self._results = trainer.results
        super().setup(trainer)
        if trainer.state.fn == "fit":
            compatibility.check_trainer(trainer, self.steps_per_batch or 1, self.lr_scheduler_configs)

    def check_sync_batchnorm(self, world_size: int) -> None:
        Strategy.check_sync_batchnorm(self, world_size)  # replicas are inside the compiled step

    def setup_model(self, *, training: bool = True) -> None:
        super().setup_model(training=training)
        self.steps_per_batch = options.sizes(self._training_options()).iterations

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        assert self.module is not None
        compatibility.check_model(self.module, optimizers)
        compatibility.check_clipping(self.gradient_clip_val, self.gradient_clip_algorithm)
        scaling = self._loss_scaling
        (optimizer,) = optimizers
        made = device_optimizers.on_device(
            optimizer,
            clip_val=self.gradient_clip_val,
            loss_scaling=scaling if isinstance(scaling, float | int) else None,
        )
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn that it never steps
        super().setup_optimizers([made], lr_scheduler_configs)

    def restore_module(self) -> None:
        super().restore_module()
        self._destroy()

    def teardown(self) -> None:
        try:
            self._destroy()
        finally:
            self._forget()
            super().teardown()

    def _destroy(self) -> None:
        """Destroy all executors: the weights come to the host, and the module's classes are its own."""
        runnings = [running for running in (self._training, *self._others.values()) if running is not None]
        self._training, self._others, self._current = None, {}, None
        with ExitStack() as stack:  # each, even where another one fails
            for running in runnings:
                stack.callback(running.destroy)

    # -- steps -----------------------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        """Compile anew after parameters were frozen or unfrozen, or a mode changed, which needs another graph."""
        if self._training is not None and self._fixed() != self._frozen:
            _log.info("parameters were frozen or unfrozen, or layers changed their mode: the step is compiled anew")
            self._end_training()

    def _fixed(self) -> Any:
        """Return what a graph of the training step is made for."""
        assert self.module is not None
        return (
            [parameter.requires_grad for parameter in self.module.parameters()],
            [child.training for child in self.module.modules()],
        )

    def _end_training(self) -> None:
        assert self._training is not None
        if self._training.executor.isCompiled():
            self._random_state = list(self._training.executor.rng_state)
        if self._current is self._training:
            self._current = None
        self._training.destroy()
        self._training = None

    def step_function(self, name: str) -> Callable[..., Any]:
        """Return a function of the arguments of the module's step, for combined batches."""
        step = self.with_precision(self.module_step(name))
        if name == "training_step" and self.optimizers:
            return self._training_step(step)
        return self._other_step(name, step)

    def _training_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        optimizer: Any = self.optimizers[0]

        def run(batch: Any, *indices: Any) -> Any:
            tensors, structure = flatten(batch)
            running = self._training
            if running is None:
                self._release()
                running = self._make_training(step, batch, indices)
            elif self._current is not running:
                self._switch(running)
            if not running.fits(tensors):
                raise ModelError(
                    "training batches must be alike, as the step is compiled for the first one: it had "
                    f"{_listed(running.shapes)}, and this one {_listed(shapes(tensors))}; use drop_last=True, or pad"
                )
            if (now := device_optimizers.values(optimizer)) != self._sent:
                device_optimizers.check_change(optimizer, self._sent, now)
                running.executor.setOptimizer(optimizer)
                self._sent = now
            return running(tensors, structure)

        return run

    def _make_training(self, step: Callable[..., Any], batch: Any, indices: tuple[Any, ...]) -> CompiledStep:
        assert self.module is not None
        self._frozen = self._fixed()
        optimizer: Any = self.optimizers[0]
        running = CompiledStep(
            self.module, step, "training_step", batch, indices, self._results, self._training_options(),
            optimizer=optimizer, random_state=self._random_state,
        )  # fmt: skip
        self._sent = device_optimizers.values(optimizer)
        self._training = self._current = running
        running.compile()
        return running

    def _other_step(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        assert self.module is not None
        modes = tuple(child.training for child in self.module.modules())  # asked for anew by each evaluation

        def run(batch: Any, *indices: Any) -> Any:
            tensors, structure = flatten(batch)
            key = (name, indices[1:], modes, shapes(tensors))
            running = self._others.get(key)
            if running is None:
                self._release()
                running = self._others[key] = self._current = self._make_other(key, step, batch, tensors, indices)
                running.compile()
            elif self._current is not running:
                self._switch(running)
            return running(tensors, structure)

        return run

    def _make_other(
        self, key: Any, step: Callable[..., Any], batch: Any, tensors: list[torch.Tensor], indices: tuple[Any, ...]
    ) -> CompiledStep:
        assert self.module is not None
        given = options.for_inference(self.inference_options, self._flags())
        parts = options.sizes(given).parts
        name = key[0]
        earlier = [other for other in self._others if other[:-1] == key[:-1]]
        if (earlier or self._dealt) and any(tensor.dim() and tensor.shape[0] % parts for tensor in tensors):
            # the last batch of a loader, of any size; it may be the only one
            given = options.for_inference(self.inference_options, self._flags(), whole=False)
        if len(earlier) == 2:
            _log.warning(
                "%s gets batches of a third shape, and is compiled for each: pad them to one, or use drop_last=True",
                name,
            )
        return CompiledStep(self.module, step, name, batch, indices, self._results, given)

    def _release(self) -> None:
        """Give the IPUs back, for another executor."""
        if self._current is not None:
            self._current.release()
            self._current = None

    def _switch(self, running: CompiledStep) -> None:
        self._release()
        self._current = running  # a call attaches it, and brings the host's weights

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the step has done it."""

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Do nothing: gradients live within a step."""

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        raise ConfigurationError(
            "on IPUs gradients are clipped within the compiled step: set gradient_clip_val of the Trainer, or of the "
            "strategy before setup_optimizers"
        )

    def grad_norm(self, optimizer: Optimizer) -> torch.Tensor:
        raise ConfigurationError("on IPUs gradients live within the compiled step, and no norm of them can be read")

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Return how many steps the call has taken, and move schedulers that follow steps along."""
        if closure is not None:
            raise ModelError("on IPUs the update is part of the compiled step, and can't call a closure")
        count = self.steps_per_batch or 1
        for config in self.lr_scheduler_configs if count > 1 else ():
            if config.interval == "step":
                for _ in range(count - 1):  # the loop takes the last one
                    config.scheduler.step()
        return StepResult(count, updated=True)

    # -- data ------------------------------------------------------------------------------------------------

    def process_dataloader(self, loader: Any, *, training: bool) -> Any:
        given = self._training_options() if training else options.for_inference(self.inference_options, self._flags())
        processed = dataloader.combined(loader, given, training=training)
        if not training and dataloader.is_combined(processed):
            self._dealt = True  # by poptorch, of which only the last batch can be of another size
        return processed

    # -- state and checkpoints -------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        if self._training is not None and self._training.executor.isCompiled():
            self._training.executor.copyWeightsToHostIfNeeded()
        return {
            name: value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
            for name, value in super().module_state_dict().items()
        }

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        self._release()  # whoever runs next takes the host's weights along
        return super().load_module_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the device's state under poptorch's keys, beside torch's."""
        state = super().optimizer_state(optimizer)
        running = self._training
        random_state = self._random_state
        if running is not None and running.executor.isCompiled():
            random_state = list(running.executor.rng_state)
        return {**state, RANDOM_STATE: random_state}

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Do nothing: only ``load_state_dict`` of the device's optimizer reports what it takes."""

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Continue from :meth:`optimizer_state`.

        Raises:
            CheckpointMismatchError: the state was not an IPU's, or not this optimizer's.
        """
        self._release()
        own = {name: value for name, value in state.items() if name != RANDOM_STATE}
        try:
            device_optimizers.load(optimizer, own)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointMismatchError(
                f"the optimizer state doesn't belong to {type(optimizer).__name__} on IPUs: {error}. A run elsewhere "
                "keeps another state: load its weights into the model, and fit without ckpt_path"
            ) from error
        self._random_state = state.get(RANDOM_STATE)


def _listed(kinds: tuple[Any, ...]) -> str:
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds)
