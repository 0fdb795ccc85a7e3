"""Average the weights of a model beside it, on each rank those that it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn


class AveragedWeights:
    """A :class:`torch.optim.swa_utils.AveragedModel` of the tensors that this rank holds, and their exchange.

    Of a sharded parameter it averages this rank's shard. It copies the tensors only, neither the module nor what hangs
    on it.

    Args:
        module: the user's model; the average begins as a copy of its weights, which the first update takes anew.
        device: where the average is kept; None for the weights' own.
        options: ``avg_fn``, ``multi_avg_fn`` and ``use_buffers`` of ``AveragedModel``.
    """

    def __init__(self, module: nn.Module, device: torch.device | None = None, **options: Any) -> None:
        holder = nn.Module()
        for index, tensor in enumerate(_parameters(module)):
            copied = tensor.to(device or tensor.device, copy=True)
            holder.register_parameter(str(index), nn.Parameter(copied, requires_grad=False))
        for index, tensor in enumerate(_buffers(module)):
            holder.register_buffer(f"buffer{index}", tensor.to(device or tensor.device, copy=True))
        if options.get("avg_fn") is None and options.get("multi_avg_fn") is None:
            options["multi_avg_fn"] = _mean
        self._model = AveragedModel(holder, device=device, **options)

    @property
    def n_averaged(self) -> int:
        """How many states of the model it is the average of."""
        return int(self._model.n_averaged)

    @n_averaged.setter
    def n_averaged(self, count: int) -> None:
        self._model.n_averaged.fill_(count)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take the present weights of ``module`` into the average."""
        self._model.update_parameters(_Held(module))  # type: ignore[arg-type]

    @torch.no_grad()
    def swap(self, module: nn.Module) -> None:
        """Exchange the weights of ``module`` and the average."""
        for mine, live in self._pairs(module):
            before = mine.clone()
            mine.copy_(live)
            live.copy_(before)

    @torch.no_grad()
    def load(self, module: nn.Module, load: Callable[[], object]) -> None:
        """Take as the average what ``load`` loads into ``module``, whose weights are the same afterwards."""
        before = [live.clone() for _, live in self._pairs(module)]
        load()
        for (mine, live), running in zip(self._pairs(module), before, strict=True):
            mine.copy_(live)
            live.copy_(running)

    @torch.no_grad()
    def copy_parameters_to(self, module: nn.Module) -> None:
        """Give ``module`` the averaged parameters; its buffers stay."""
        for mine, live in zip(self._model.module.parameters(), _parameters(module), strict=True):
            live.copy_(mine)

    def matches(self, module: nn.Module) -> bool:
        """Return whether ``module`` has weights of the same shapes, in the same order."""
        live = [*_parameters(module), *_buffers(module)]
        return [each.shape for each in self._tensors()] == [each.shape for each in live]

    def by_name(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the averaged tensors by the names that they have in ``module``, each name of a shared one."""
        held = {id(tensor): mine for tensor, mine in zip(_tensors_of(module), self._tensors(), strict=True)}
        named = itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
        return {name: held[id(tensor)] for name, tensor in named if id(tensor) in held}

    def parameters_by_name(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the averaged parameters by the names that they have in ``module``, one for each."""
        names = (name for name, parameter in module.named_parameters() if not parameter.is_meta)
        return {name: each.detach() for name, each in zip(names, self._model.module.parameters(), strict=True)}

    def _tensors(self) -> Iterator[Tensor]:
        holder = self._model.module
        return (tensor.detach() for tensor in itertools.chain(holder.parameters(), holder.buffers()))

    def _pairs(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._tensors(), itertools.chain(_parameters(module), _buffers(module)), strict=True)


def _mean(averages: Sequence[Tensor], weights: Sequence[Tensor], count: Tensor) -> None:
    """Let all states count alike, as ``AveragedModel`` does by default; off the CPU that fails for integer buffers."""
    if averages[0].is_floating_point() and not averages[0].is_cpu:
        get_swa_multi_avg_fn()(averages, weights, count)  # type: ignore[no-untyped-call]
        return
    mean = get_swa_avg_fn()  # type: ignore[no-untyped-call]
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(mean(average, weight, count))


class _Held:
    """The face of a module that ``AveragedModel.update_parameters`` reads."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> Iterator[Tensor]:
        return _parameters(self._module)

    def buffers(self) -> Iterator[Tensor]:
        return _buffers(self._module)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers that this rank holds; a pipeline's other stages are on the meta device."""
    return (tensor for tensor in itertools.chain(module.parameters(), module.buffers()) if not tensor.is_meta)


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    return (_local(parameter) for parameter in module.parameters() if not parameter.is_meta)


def _buffers(module: nn.Module) -> Iterator[Tensor]:
    return (_local(buffer) for buffer in module.buffers() if not buffer.is_meta)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    detached: Any = tensor.detach()
    local: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return local
