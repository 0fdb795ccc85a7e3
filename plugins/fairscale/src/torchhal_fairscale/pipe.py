"""Train with fairscale's Pipe: the layers of an ``nn.Sequential`` on several devices, a batch in micro-batches."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch import nn

from torchhal.composition import Composition
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.plugin import Availability
from torchhal.pytree import move_to_device
from torchhal.strategies import SingleDeviceStrategy
from torchhal_fairscale import _sdk as sdk
from torchhal_fairscale._autocast import RecordedAutocast
from torchhal_fairscale._pipe_comparison import PipeComparison
from torchhal_fairscale._pipe_layers import balanced, check_no_batch_statistics, find_layers
from torchhal_fairscale._replaced_forward import ReplacedForward, has_other_forward

_CHECKPOINTS = ("always", "except_last", "never")


class FairscalePipeStrategy(SingleDeviceStrategy):
    """``fairscale.nn.Pipe`` in one process: while a device computes on a micro-batch, the next one has the one before.

    The module's ``nn.Sequential`` runs through Pipe when it is called, so ``training_step`` and the names in a state
    dict stay. What it returns is on the first device, where the loss and everything else is computed.

    Args:
        layers: the name of the ``nn.Sequential``, as ``"body"``; not needed where the module has a single one.
        balance: number of layers of each device, in order; by default their parameters are shared out.
        chunks: number of micro-batches of a batch; by default as many as devices. Losses are of the whole batch, and
            gradients of micro-batches are added up.
        checkpoint: for which micro-batches activations are computed again in backward instead of being kept:
            ``"always"``, ``"except_last"`` or ``"never"``.
        parts: as of :class:`.Strategy`.

    Raises:
        ConfigurationError: fairscale is missing or doesn't fit; a value that can't be.
        ModelError: there is no ``nn.Sequential``, or a layer of it works on whole batches.
    """

    multi_device: ClassVar[bool] = True
    inference_mode: ClassVar[bool] = False  # Pipe's threads aren't in it, and couldn't write to what was made in it

    autocast: RecordedAutocast
    """The one in which the layers were called."""

    @classmethod
    def availability(cls) -> Availability:
        return sdk.FAIRSCALE.availability()

    def __init__(
        self,
        *,
        layers: str | None = None,
        balance: Sequence[int] | None = None,
        chunks: int | None = None,
        checkpoint: str = "except_last",
        **parts: Any,
    ) -> None:
        if checkpoint not in _CHECKPOINTS:
            raise ConfigurationError(f"'checkpoint' must be one of {', '.join(_CHECKPOINTS)} (got {checkpoint!r})")
        if chunks is not None and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):
            raise ConfigurationError(f"'chunks' must be an int of at least 1 (got {chunks!r})")
        if balance is not None and not (balance and all(isinstance(each, int) and each > 0 for each in balance)):
            raise ConfigurationError(f"'balance' must be numbers of layers, at least 1 each (got {balance!r})")
        super().__init__(**parts)
        sdk.FAIRSCALE.check()
        self.layers = layers
        self.balance = balance
        self.chunks = chunks
        self.checkpoint = checkpoint
        self._pipe: Any = None
        self._piped: nn.Sequential | None = None
        self._forward_through_pipe: _PipedForward | None = None
        self._divided: list[nn.Module] = []
        """The layers that Pipe has."""
        self._threads: list[threading.Thread] = []
        """Pipe's."""
        self._compared = False

    # -- life cycle ------------------------------------------------------------------------------------------

    def check_fit(self, composition: Composition) -> None:
        super().check_fit(composition)
        if composition.num_nodes is not None and composition.num_nodes > 1:
            raise UnsupportedCombinationError(
                f"strategy {self.display_name!r} drives the devices of one node from one process (got num_nodes="
                f"{composition.num_nodes}): use strategy='pipeline' or 'hybrid' of torchhal-parallel"
            )
        environment = composition.cluster_environment
        outside = environment is not None and environment.creates_processes_externally and environment.world_size() > 1
        if outside or launched_by() is not None:
            raise UnsupportedCombinationError(
                f"strategy {self.display_name!r} drives all devices from one process, but this is one of several "
                "that were started, each of which would train by itself: start the script once, or use "
                "strategy='pipeline'"
            )

    def num_local_processes(self, num_devices: int) -> int:
        return 1

    def setup_environment(self) -> None:
        if not self.is_set_up:
            sdk.load()
            for device in self.devices[1:]:
                self.accelerator.setup_device(device)
        super().setup_environment()

    def setup_model(self, *, training: bool = True) -> None:
        assert self.module is not None, "connect() comes first"
        sdk.check_not_fully_sharded(self.module, self.display_name)
        self._remove()
        self._compared = not training
        found = find_layers(self.module, self.layers, self.display_name, required=len(self.devices) > 1)
        if found is not None:
            name, layers = found
            if has_other_forward(layers):
                raise ModelError(f"{name!r} has a forward of its own on the object, which Pipe would leave out")
            if training:
                check_no_batch_statistics(layers, self._num_chunks, self.checkpoint, self.display_name)
            self._piped = layers
        super().setup_model(training=training)

    def model_to_device(self) -> None:
        """Move each layer to its device; what isn't one of the layers goes to the first."""
        layers = self._piped
        if layers is None:  # on one device
            super().model_to_device()
            return
        if any(tensor.is_meta for tensor in (*layers.parameters(), *layers.buffers())):
            super().model_to_device()  # which says so
        children, layers._modules = layers._modules, {}
        try:
            super().model_to_device()
        finally:
            layers._modules = children
        self._pipe = self._make_pipe(layers)
        self._forward_through_pipe = _PipedForward(layers, self)
        self._forward_through_pipe.put()

    def _make_pipe(self, layers: nn.Sequential) -> Any:
        from fairscale.nn import Pipe

        devices = list(self.devices) or [self.root_device]
        if len(layers) < len(devices):
            raise ConfigurationError(
                f"strategy {self.display_name!r} can't give {len(layers)} layers to {len(devices)} devices: use fewer"
            )
        sizes = [sum(each.numel() for each in layer.parameters()) for layer in layers]
        balance = list(self.balance) if self.balance is not None else balanced(sizes, len(devices))
        if len(balance) != len(devices) or sum(balance) != len(layers):
            raise ConfigurationError(
                f"'balance' must share {len(layers)} layers out to {len(devices)} devices (got {self.balance!r})"
            )
        before = set(threading.enumerate())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # for a Pipe that torch has removed
                pipe = Pipe(layers, balance, devices=devices, chunks=self._num_chunks, checkpoint=self.checkpoint)
        except ValueError as error:  # one layer in two places, one weight on two devices
            raise ModelError(f"fairscale's Pipe can't divide the layers: {error}") from error
        self._threads = [each for each in threading.enumerate() if each not in before and each.daemon]
        self._divided = list(layers)
        for part in pipe.partitions:
            vars(part)["forward"] = _Part(part, self)
        return pipe

    @property
    def _num_chunks(self) -> int:
        return self.chunks or max(1, len(self.devices))

    @property
    def _recomputes(self) -> bool:
        """True if some micro-batches are computed again in backward."""
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and self._num_chunks > 1)

    def restore_module(self) -> None:
        super().restore_module()
        self._remove()

    def release_model(self) -> None:
        self._remove()
        super().release_model()

    def _remove(self) -> None:
        """Give the layers their own forward back, and end Pipe's threads."""
        pipe, threads, self._threads = self._pipe, self._threads, []
        if pipe is not None:
            for queue in set(pipe.pipeline.in_queues):
                queue.put(None)
            # Pipe doesn't wait for their end, and one that frees a tensor while Python ends aborts the process.
            for thread in threads:
                thread.join(timeout=1.0)
        forward, self._forward_through_pipe = self._forward_through_pipe, None
        self._piped, self._pipe, self._divided = None, None, []
        if forward is not None:
            forward.remove()

    # -- forward ---------------------------------------------------------------------------------------------

    def _forward(self, input: Any) -> Any:
        """Run the layers through Pipe, with tensors that come from, and go back to, the first device."""
        layers = self._piped
        assert layers is not None
        self._check_input(input)
        current = list(layers)
        if len(current) != len(self._divided) or not all(map(is_, current, self._divided)):  # a layer was replaced
            self._pipe = self._make_pipe(layers)
        pipe = self._pipe
        self.autocast = RecordedAutocast([self.root_device.type])
        for part in pipe.partitions:
            part.training = layers.training  # by which it decides about checkpoints
        first, home = pipe.devices[0], self.root_device
        if not self._compared and layers.training:
            self._compared = True
            divided, recomputed = self._num_chunks > 1, self._recomputes
            if divided or recomputed:
                comparison = PipeComparison(
                    layers, pipe, alias=self.display_name, accelerator=self.accelerator, home=self.root_device
                )
                comparison.run(input, divided=divided, recomputed=recomputed)
        try:
            return move_to_device(pipe(move_to_device(input, first)), home)
        except _LayerExit as error:
            raise error.error from error

    def _check_input(self, input: Any) -> None:
        tensors = input if isinstance(input, tuple) else (input,)
        if not all(isinstance(each, torch.Tensor) and each.dim() for each in tensors):
            raise ModelError(
                f"strategy {self.display_name!r} divides what the layers are called with along its first dimension: "
                "call them with a tensor, or a tuple of tensors"
            )
        if len({len(each) for each in tensors}) > 1:  # Pipe would leave out the micro-batches that one hasn't got
            raise ModelError(
                f"strategy {self.display_name!r} divides a batch along the first dimension, and the layers were called "
                f"with tensors of {', '.join(str(len(each)) for each in tensors)} samples: expand what belongs to all"
            )


class _PipedForward(ReplacedForward):
    """The forward of the layers, through Pipe."""

    def __init__(self, layers: nn.Sequential, strategy: FairscalePipeStrategy) -> None:
        super().__init__(layers)
        self._strategy = strategy

    def __call__(self, input: Any) -> Any:
        return self._strategy._forward(input)


class _Part:
    """The forward of a part of the layers, in one of Pipe's threads.

    The thread doesn't have the autocast of the one that calls Pipe, and an error that is no Exception, as that of
    ``sys.exit``, would end it, and leave the caller waiting.
    """

    def __init__(self, part: nn.Sequential, strategy: FairscalePipeStrategy) -> None:
        self._layers = tuple(part)
        self._strategy = strategy

    def __call__(self, input: Any) -> Any:
        try:
            with self._strategy.autocast.entered():
                for layer in self._layers:
                    input = layer(input)
            return input
        except Exception:
            raise
        except BaseException as error:
            raise _LayerExit(error) from error


class _LayerExit(Exception):
    """A layer has raised ``error``, which is no Exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error
