"""Data parallel in one process: a batch in parts, one on each device, and one model; alone, or one on each node."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchhal.composition import Composition
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError, message_of
from torchhal.memory_estimate import ModelMemory
from torchhal.pytree import move_to_device
from torchhal.step_memory import MemoryByPhase, StepMemory
from torchhal.strategies import (
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
    around_call,
    check_frequencies,
    check_lookups,
)
from torchhal.trainer.logging import batch_size_of
from torchhal_parallel._microbatch_logging import merged_log
from torchhal_parallel._part_losses import NotComparedError, PartLosses, is_compiled
from torchhal_parallel._scatter_gather import merge, merge_training, split_batch
from torchhal_parallel._tensor_swap import buffer_copies, parameter_copies, swapped_tensors

Split = Callable[[Any, int], Sequence[Any]]
"""``split(batch, parts)``: at most ``parts`` batches whose ``batch_size_of`` is known, together the whole."""


class BatchSplitStrategy(Strategy):
    """A base of strategies whose steps run on the parts of a batch, one per device of this process.

    The model and the optimizer's state are on :attr:`root_device`. The first part uses the model as it is. For each
    other one, copies of the parameters on its device stand in for them, through which autograd adds the gradients of
    all parts up in the one model; on the same device the parameters themselves are used. Copies of the buffers stand
    in as well: what a step does to them counts for the first part alone.

    The module is always the user's own object: the parts run one after another. A device works while the next one's
    part is being queued, and their backward passes run at the same time.

    A loop by hand may call :attr:`model` too: its arguments are divided, and its outputs put together.
    """

    multi_device: ClassVar[bool] = True

    split: Split | None = None
    """The user's function that divides batches; None: tensors are divided along their first dimension."""

    _unmade = False
    """Whether the first forward will make parameters or buffers whose shapes are not known yet."""

    _batches = 0
    """Batches of training that were divided."""

    _compared = False
    """Whether the losses of some batch were compared."""

    _said = False
    """Whether a warning was given that losses were not compared."""

    _in_step = False
    """Whether a step that divides its batch by itself runs through :attr:`model`."""

    def num_local_processes(self, num_devices: int) -> int:
        return 1

    def memory_by_phase(self, step: StepMemory, model: ModelMemory, world_size: int) -> MemoryByPhase:
        """Return the phases of the first device, which has the model and, of each batch, one part."""
        parts = max(1, len(self.devices))
        moments = tuple(moment._replace(activations=-(-moment.activations // parts)) for moment in step.moments)
        step = replace(step, moments=moments, batch=-(-step.batch // parts), outputs=-(-step.outputs // parts))
        return (
            super()
            .memory_by_phase(step, model, world_size)
            .plus(
                0,
                f"of the first of {parts} devices, among which the batch of a process is divided; each other one has a "
                "copy of the parameters while it computes"
                if parts > 1
                else "as with one device: the batch of a process is divided among its devices",
            )
        )

    def check_sync_batchnorm(self, world_size: int) -> None:
        if len(self.devices) > 1:
            raise UnsupportedCombinationError(
                f"strategy {self.alias or 'dp'!r} runs the parts of a batch in turn, and can't let batch norms "
                "compute over all of them (sync_batchnorm=True): use 'ddp', or leave sync_batchnorm out"
            )
        super().check_sync_batchnorm(world_size)

    def setup_environment(self) -> None:
        if not self.is_set_up:
            for device in self.devices[1:]:
                self.accelerator.setup_device(device)
        super().setup_environment()

    def setup_model(self, *, training: bool = True) -> None:
        if training and len(self.devices) > 1 and not getattr(self.module, "automatic_optimization", True):
            raise ConfigurationError(
                f"strategy {self.alias or 'dp'!r} runs a step once for each of its {len(self.devices)} devices, and "
                f"{type(self.module).__name__} with automatic_optimization=False would step its optimizers as often: "
                "use 'ddp', or devices=1"
            )
        assert self.module is not None
        if training and len(set(self.devices)) > 1:
            check_lookups(self.module, "what it writes to a copy on another device is lost")
        if training and len(self.devices) > 1:
            check_frequencies(self.module, "each part of a batch")
        super().setup_model(training=training)
        self._batches, self._compared, self._said = 0, False, False
        self._unmade = any(map(is_lazy, (*self.module.parameters(), *self.module.buffers())))

    def wrap_model(self, *, training: bool) -> None:
        if self.trainer is None and len(self.devices) > 1:
            assert self.module is not None
            self.model = InParts(self, self.module)
        super().wrap_model(training=training)

    def explain(self, error: BaseException) -> BaseException:
        """Return a ModelError for tensors that a part finds on another part's device, else ``error``."""
        if isinstance(error, RuntimeError) and "same device" in message_of(error) and len(set(self.devices)) > 1:
            return ModelError(
                f"{error}. Under strategy {self.alias or 'dp'!r} a step runs on each of "
                f"{', '.join(map(str, self.devices))}: make the tensors that a model keeps parameters or buffers, new "
                "ones on self.device, and use no activation checkpointing, which computes again when the parameters "
                "are only on the first device"
            )
        return super().explain(error)

    # -- steps -----------------------------------------------------------------------------------------------

    def in_parts(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return ``step`` of the module, run on each part of its batch; ``name`` is its name."""
        if len(self.devices) == 1:
            return step

        def call(batch: Any, *rest: Any) -> Any:
            parts = self.parts_of(batch)
            if len(parts) == 1:
                return step(parts[0][0], *rest)
            sizes = [size for _, size in parts]
            losses = self._losses_to_compare(batch) if name == "training_step" else None
            outputs = self._run(step, [part for part, _ in parts], sizes, rest, losses)
            if losses is not None:
                self._check_losses(losses, step, rest, outputs, sizes)
            if name == "training_step":
                return merge_training(outputs, sizes, self.root_device)
            return merge(outputs, sizes, self.root_device)

        return call

    def forward_in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module with parts of its arguments, one on each device, and merge what it returns."""
        module = self.module
        assert module is not None
        if self._in_step:
            return module(*args, **kwargs)
        if self.split is not None:
            raise ConfigurationError(
                f"the 'split' of strategy {self.alias or 'dp'!r} divides batches, and strategy.model(...) gets the "
                "module's own arguments: run a step on the batch, strategy.step_function('training_step'), or leave "
                "'split' out"
            )
        return self.in_parts(lambda given: module(*given[0], **given[1]), "forward")((args, kwargs))

    def parts_of(self, batch: Any) -> list[tuple[Any, int]]:
        """Return the parts of a batch and their numbers of samples."""
        if self.split is None:
            return split_batch(batch, len(self.devices))
        parts = list(self.split(batch, len(self.devices)))
        sizes = [batch_size_of(part) for part in parts]
        if not 1 <= len(parts) <= len(self.devices) or not all(sizes):
            raise ModelError(
                f"'split' must return from 1 to {len(self.devices)} batches whose sizes can be read, as the first "
                f"dimension of a tensor or an int attribute batch_size (got {len(parts)} batches of sizes {sizes})"
            )
        return [(part, size or 0) for part, size in zip(parts, sizes, strict=True)]

    def _run(
        self,
        step: Callable[..., Any],
        parts: Sequence[Any],
        sizes: Sequence[int],
        rest: tuple[Any, ...],
        losses: PartLosses | None,
    ) -> list[Any]:
        module = self.module
        assert module is not None
        devices = self.devices[: len(parts)]
        self._seed_other_devices(devices)
        # all before the first part runs: each gets the values from before the batch
        buffers = [buffer_copies(module, device) for device in devices[1:]]
        outputs = []
        watched = nullcontext if losses is None else losses.recorded
        with merged_log(self.trainer, sizes, self.root_device) as start_part:
            with watched():
                outputs.append(step(parts[0], *rest))
            if self._unmade:
                buffers = [buffer_copies(module, device) for device in devices[1:]]
                self._unmade = False
            for index, device in enumerate(devices[1:], start=1):
                start_part(index)
                with self._current(device):
                    copies = parameter_copies(module, device)
                    with swapped_tensors([*copies, *buffers[index - 1]]), watched():
                        outputs.append(step(move_to_device(parts[index], device, non_blocking=True), *rest))
        return outputs

    def _losses_to_compare(self, batch: Any) -> PartLosses | None:
        """Return what compares the losses of this batch, if it is the first, the second, the fourth, the eighth, ..."""
        self._batches += 1
        assert self.module is not None
        if self._batches & (self._batches - 1) or self.split is not None:  # which may divide in any order
            return None
        if is_compiled(self.module):
            self._say_not_compared("a part of it is compiled")
            return None
        return PartLosses(self, batch)

    def _check_losses(
        self,
        losses: PartLosses,
        step: Callable[..., Any],
        rest: tuple[Any, ...],
        outputs: Sequence[Any],
        sizes: Sequence[int],
    ) -> None:
        """Raise ModelError if the mean of the losses of the parts is not that of the batch."""
        try:
            problem = losses.unlike(step, rest, outputs, sizes)
        except NotComparedError as reason:
            if not (self._compared and 1 in sizes):  # of one sample it is not always seen what is one per sample
                self._say_not_compared(str(reason))
            return
        self._compared = True
        if problem is not None:
            raise ModelError(problem)

    def _say_not_compared(self, reason: str) -> None:
        """Warn once on rank 0."""
        if not self._said and self.is_global_zero:
            warnings.warn(
                f"whether the loss of {type(self.module).__name__} is a mean over samples could not be tried "
                f"({reason}): strategy {self.alias or 'dp'!r} trains on the mean of the losses of the parts of a "
                "batch, weighed by their samples. If it is none, use devices=1",
                stacklevel=2,
            )
        self._said = True

    @contextmanager
    def _current(self, device: torch.device) -> Iterator[None]:
        """Make ``device`` the current one of its type, for what a step makes without naming an index."""
        with ExitStack() as stack:
            if device.index is not None and device != self.root_device:
                stack.enter_context(torch.get_device_module(device.type).device(device))
            yield

    def _seed_other_devices(self, devices: Sequence[torch.device]) -> None:
        """Let the other devices' generators follow the first one's, which is the one that checkpoints contain."""
        others = [device for device in devices if device != self.root_device]
        if not others:
            return
        state = self.accelerator.get_rng_state(self.root_device)
        seed = zlib.crc32(bytes(state.tolist()))
        for index, device in enumerate(others, start=1):
            generator = torch.Generator(device=device).manual_seed(seed + (index << 32))
            self.accelerator.set_rng_state(generator.get_state(), device)


class InParts(nn.Module):
    """:attr:`Strategy.model` where no Trainer runs the steps: its forward is ``forward_in_parts`` of the strategy."""

    def __init__(self, strategy: BatchSplitStrategy, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._strategy = strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._strategy.forward_in_parts(args, kwargs)


class DataParallelStrategy(BatchSplitStrategy, SingleDeviceStrategy):
    """One process that drives several devices: each batch is divided among them.

    The loader's batch is the global batch, and the result is that of one device, but for what depends on more than a
    sample: a batch norm gets its part of the batch, dropout draws other numbers. The loss must be a mean over the
    samples: those of the parts are weighed by their sizes, and what is none is refused at the batches 1, 2, 4, 8, ...
    Each value that a step logs becomes one per batch.

    Args:
        split: a function ``(batch, parts)`` that divides batches which the strategy can't: it divides tensors in dicts,
            lists, tuples and dataclasses along their first dimension.
        parts: see :class:`torchhal.strategies.Strategy`.

    The parameters are sent to every other device in every step, so ``ddp`` is faster wherever it can be used.
    """

    def __init__(self, *, split: Split | None = None, **parts: Any) -> None:
        super().__init__(**parts)
        self.split = _checked(split)

    def check_fit(self, composition: Composition) -> None:
        environment = composition.cluster_environment
        alias = self.alias or "dp"
        if composition.num_nodes is not None and composition.num_nodes > 1:
            raise UnsupportedCombinationError(
                f"strategy {alias!r} drives the devices of one node from one process (got num_nodes="
                f"{composition.num_nodes}): use 'ddp2', which does so on each node, or 'ddp'"
            )
        outside = environment is not None and environment.creates_processes_externally and environment.world_size() > 1
        if outside or launched_by() is not None:
            raise UnsupportedCombinationError(
                f"strategy {alias!r} drives all devices from one process, but this is one of several that "
                "were started, each of which would train by itself: start the script once, or use 'ddp'"
            )

    def module_step(self, name: str) -> Callable[..., Any]:
        return self.in_parts(super().module_step(name), name)

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        return around_call(super().module_call(forward, training=training), lambda step: self.in_parts(step, "forward"))


class DDP2Strategy(BatchSplitStrategy, DDPStrategy):
    """One process per node, which divides its batches among the node's devices; gradients are averaged over nodes.

    Each node gets its share of the data, in batches of the loader's size.

    Args:
        split: see :class:`DataParallelStrategy`.
        options: see :class:`torchhal.strategies.DDPStrategy`.
    """

    def __init__(self, *, split: Split | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.split = _checked(split)

    def module_step(self, name: str) -> Callable[..., Any]:
        step = self.in_parts(getattr(self.module, name), name)
        if name != "training_step" or not self.automatic_optimization:
            return step  # manual_backward averages: its backward passes run inside the step
        through = self.through_wrapper(step)

        def call(*args: Any) -> Any:
            self._in_step = True
            try:
                return through(*args)
            finally:
                self._in_step = False

        return through if self.trainer is not None else call

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        call = around_call(forward, lambda step: self.in_parts(step, "forward"))
        if not training or not self.automatic_optimization:
            return call
        return around_call(call, self.through_wrapper)


def _checked(split: Split | None) -> Split | None:
    if split is not None and not callable(split):
        raise ConfigurationError(f"'split' must be a function (batch, parts) -> parts, or None (got {split!r})")
    return split


__all__ = ["BatchSplitStrategy", "DDP2Strategy", "DataParallelStrategy"]
