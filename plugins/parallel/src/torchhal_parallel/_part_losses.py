"""Check that the loss of a batch is the mean, weighed by samples, of the losses of its parts, which ``dp`` trains on.

In the batches 1, 2, 4, 8, ... the step runs once more, for the whole batch, with what its model gave for the parts as
what it gives for the whole. So no forward runs twice, but for one that makes a loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchhal import rng
from torchhal.errors import ModelError
from torchhal.pytree import map_tensors
from torchhal_parallel._batch_loss import NO_MEAN, detached, is_narrow, leaf_of, other_mean, without_traces
from torchhal_parallel._forward_capture import without_logging
from torchhal_parallel._sample_independence import batch_norm_in_training
from torchhal_parallel._scatter_gather import merge


class NotComparedError(Exception):
    """The loss of a whole batch can't be computed from what was computed for its parts; the message has the reason."""


_AGAIN = object()


@dataclass
class _Call:
    """The output of ``module`` for a part of a batch, or why that could not be kept."""

    module: nn.Module
    output: Any
    versions: list[int]
    error: Exception | None = None

    @classmethod
    def of(cls, module: nn.Module, output: Any) -> _Call:
        try:
            kept = detached(output)
            return cls(module, kept, _versions(kept))
        except Exception as error:  # of a container that can't be made again
            return cls(module, None, [], error)

    @property
    def has_number(self) -> bool:
        return any(isinstance(leaf, torch.Tensor) and not leaf.dim() for leaf in _leaves(self.output))

    def per_sample(self, size: int, model: nn.Module) -> Any:
        """Return what the module gave for ``size`` samples, with NaN for what is not one value for each of them.

        Of one sample that can't be seen, and is taken for granted of ``model`` itself only.

        Raises:
            NotComparedError: it is not what the module gave any more, or no NaN.
        """
        name = type(self.module).__name__
        if self.error is not None:
            raise NotComparedError(f"what {name} gives can't be copied ({self.error})")
        if _versions(self.output) != self.versions:
            raise NotComparedError(f"the step writes to what {name} gives")

        def replaced(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or (leaf.shape[0] == size and (size > 1 or self.module is model)):
                return leaf
            if not leaf.is_floating_point():
                raise NotComparedError(f"{name} gives a tensor of shape {tuple(leaf.shape)} for {size} samples")
            return leaf.new_full((size,), torch.nan)

        return map_tensors(self.output, replaced)


class PartLosses:
    """Records the parts of one batch.

    Args:
        strategy: whose module's step runs.
        batch: the whole.
    """

    def __init__(self, strategy: Any, batch: Any) -> None:
        self.strategy = strategy
        self.module: nn.Module = strategy.module
        self.batch = batch
        self._calls: list[list[_Call]] = []
        """Those of the step of each part."""
        self._versions = _versions(batch)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what the step of one part computes with the model inside."""
        calls: list[_Call] = []
        self._calls.append(calls)

        def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            output = original(module, *args, **kwargs)
            calls.append(_Call.of(module, output))
            return output

        with _calls_through(self.module, call):
            yield

    def unlike(
        self, step: Callable[..., Any], rest: tuple[Any, ...], outputs: Sequence[Any], sizes: Sequence[int]
    ) -> str | None:
        """Return an error text if the loss of the whole batch is another than the mean of those in ``outputs``.

        Args:
            step: the module's own.
            rest: its arguments after the batch.
            outputs: what it returned for each part.
            sizes: samples of each part.

        Raises:
            NotComparedError: the two can't be compared.
        """
        losses = [_loss_in(output) for output in outputs]
        if any(loss is None for loss in losses):
            return None  # the batch is skipped, or refused for what it is
        whole, narrow = self._loss_of_whole(step, rest, sizes)
        if whole is not None and whole.isnan() and not any(loss.isnan() for loss in losses):  # type: ignore[union-attr]
            raise NotComparedError("it is made of what is not one value for each sample")
        if whole is None or (numbers := other_mean(losses, sizes, whole, narrow=narrow)) is None:  # type: ignore[arg-type]
            return None
        alias, model = self.strategy.alias or "dp", type(self.module).__name__
        return (
            f"the training_step of {model} gives for the {sum(sizes)} samples of a batch together the loss "
            f"{numbers[0]:.6g}, and for its parts, of {', '.join(map(str, sizes))} samples, losses whose mean, weighed "
            f"by these, is {numbers[1]:.6g}, on which strategy {alias!r} would train: {NO_MEAN}. Make a sum a mean "
            "over samples times a number that is the same for each part, the batch_size of the loader say. Divide a "
            "sum over tokens by the samples times the mean number of tokens per sample of the whole batch, a tensor "
            "without dimension that collate_fn adds to the batch. Or use devices=1"
        )

    def _loss_of_whole(
        self, step: Callable[..., Any], rest: tuple[Any, ...], sizes: Sequence[int]
    ) -> tuple[torch.Tensor | None, bool]:
        """Return (the loss of the whole batch, whether 16 bits took part in it); the step leaves no changes behind."""
        strategy, device = self.strategy, self.strategy.root_device
        if _versions(self.batch) != self._versions:
            raise NotComparedError("the step writes to its batch")
        outputs_of_calls = self._merged_outputs(sizes)
        generators = rng.collect(strategy.accelerator, device)
        kept = (strategy.trainer, strategy, strategy.accelerator)
        try:
            with without_traces(self.module, kept), without_logging(self.module), self._replayed(outputs_of_calls):
                loss = _loss_in(step(self.batch, *rest))
            drawn = rng.drawn_between(generators, rng.collect(strategy.accelerator, device))
        except NotComparedError:
            raise
        except Exception as error:
            raise NotComparedError(f"{type(error).__name__}: {error}") from error
        finally:
            rng.restore(generators, strategy.accelerator, device)
        if drawn:
            raise NotComparedError(f"it draws random numbers ({drawn[0]})")
        return loss, is_narrow(device, [output for _, output in outputs_of_calls])

    def _merged_outputs(self, sizes: Sequence[int]) -> list[tuple[nn.Module, Any]]:
        """Return the calls of the step, with their outputs for the whole batch; :data:`_AGAIN`: they must run."""
        if any([each.module for each in calls] != [each.module for each in self._calls[0]] for calls in self._calls):
            raise NotComparedError("it calls other modules for one part than for another")
        return [(calls[0].module, self._merged_output(calls, sizes)) for calls in zip(*self._calls, strict=True)]

    def _merged_output(self, calls: Sequence[_Call], sizes: Sequence[int]) -> Any:
        if any(each.has_number for each in calls):  # a loss perhaps, which others were to be computed from
            return _AGAIN
        outputs = [each.per_sample(size, self.module) for each, size in zip(calls, sizes, strict=True)]
        try:
            return map_tensors(merge(outputs, sizes, self.strategy.root_device), leaf_of)
        except (ModelError, RuntimeError) as error:
            name = type(calls[0].module).__name__
            raise NotComparedError(f"what {name} gives for the parts can't be put together: {error}") from error

    @contextmanager
    def _replayed(self, outputs_of_calls: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
        remaining = iter(outputs_of_calls)

        def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            expected, output = next(remaining, (None, None))
            if expected is not module:
                raise NotComparedError("it calls other modules for the whole batch than for its parts")
            if output is not _AGAIN:
                return output
            if (name := batch_norm_in_training(module)) is not None:
                raise NotComparedError(f"{type(module).__name__} makes a loss itself, and {name!r} is a batch norm")
            with torch.no_grad():
                return original(module, *args, **kwargs)

        with _calls_through(self.module, call):
            yield


@contextmanager
def _calls_through(model: nn.Module, instead: Callable[..., Any]) -> Iterator[None]:
    """Run ``instead(original, module, args, kwargs)`` for calls of ``model`` and of its submodules with parameters.

    Not for calls that are made inside of these.
    """
    own = {id(each) for each in model.modules() if next(each.parameters(), None) is not None} | {id(model)}
    original: Callable[..., Any] = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in own:
            return original(module, *args, **kwargs)
        nn.Module.__call__ = original  # type: ignore[method-assign]
        try:
            return instead(original, module, args, kwargs)
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def is_compiled(model: nn.Module) -> bool:
    """Return whether a part of ``model`` is from ``torch.compile``, whose calls are not those of a module."""
    return any("_orig_mod" in each._modules for each in model.modules())


def _loss_in(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _versions(nest: Any) -> list[int]:
    """Return how often each tensor was written to, through views of it too."""
    tensors = [leaf for leaf in _leaves(nest) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
    return [tensor._version for tensor in tensors]


def _leaves(nest: Any) -> list[Any]:
    found: list[Any] = []

    def look(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_tensors(nest, look)
    return found
