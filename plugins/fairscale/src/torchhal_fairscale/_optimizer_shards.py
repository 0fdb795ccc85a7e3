"""Divide the step of a user's optimizer among the ranks with fairscale's OSS."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchhal.strategies.sharded_optimizers import with_parameters
from torchhal_fairscale._sdk import root_logger_kept


class OptimizerShards:
    """An optimizer of the user's, each of whose parameters one rank steps.

    OSS decides which, keeps the parameters of a rank in one buffer, and broadcasts these after the step. It would make
    an optimizer of its own over a rank's parameters, of which schedulers and callbacks know nothing, so what it gets is
    an :class:`_Step` that lets the user's optimizer step: that has the parameters of this rank alone while it does.

    OSS takes parameters of one dtype, and forgets who has which when a group is added, so there is an OSS for each
    dtype of each set of parameters that came together.

    Args:
        optimizer: the user's.
        rank: of this process in the default process group.
    """

    def __init__(self, optimizer: Optimizer, rank: int) -> None:
        self.optimizer = optimizer
        self.rank = rank
        self.parts: list[Any] = []
        """The ``fairscale.optim.OSS`` objects."""
        self.owner: dict[torch.Tensor, int] = {}
        """The rank that steps each parameter."""
        self._place: dict[torch.Tensor, Any] = {}
        """The OSS of each parameter."""
        self._strides: dict[torch.Tensor, tuple[int, ...]] = {}
        """Of parameters that were not contiguous."""
        self._everything: list[list[torch.Tensor]] = []
        """The parameters of each group, when the present step began."""
        self._released = False
        self.update()

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return the optimizer's parameters, in the order of its groups."""
        return chain.from_iterable(group["params"] for group in self.optimizer.param_groups)

    def update(self) -> bool:
        """Divide what is new in the optimizer's groups; return whether anything was."""
        from fairscale.optim import OSS

        kinds: dict[tuple[torch.device, torch.dtype], list[list[torch.Tensor]]] = {}
        for group in self.optimizer.param_groups:
            own: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter in self.owner:
                    continue
                if parameter.numel():
                    own.setdefault((parameter.device, parameter.dtype), []).append(parameter)
                else:  # nothing to send
                    self.owner[parameter] = 0
            for kind, parameters in own.items():  # OSS reads the device of the first group's first parameter
                kinds.setdefault(kind, []).append(parameters)
        for groups in kinds.values():
            for parameter in chain.from_iterable(groups):
                if not parameter.is_contiguous():
                    self._strides[parameter] = parameter.stride()
            with root_logger_kept():
                part = OSS([{"params": parameters} for parameters in groups], optim=_Step)
            self.parts.append(part)
            self._keep_strides()
            for parameter in chain.from_iterable(groups):
                self.owner[parameter] = part._param_to_rank[parameter]
                self._place[parameter] = part
        return bool(kinds)

    def own(self) -> list[list[torch.Tensor]]:
        """Return the parameters of each group that this rank steps."""
        return [
            [parameter for parameter in group["params"] if self.owner[parameter] == self.rank]
            for group in self.optimizer.param_groups
        ]

    def step(self, run: Callable[[], None]) -> list[torch.Tensor]:
        """Call ``run``, which steps the optimizer, with this rank's parameters in it, and send them to the others.

        Returns:
            Parameters that were stepped and not sent: frozen ones with a gradient, which OSS leaves out.
        """
        self.update()
        missing = self._refresh()

        def with_own_parameters() -> None:
            with with_parameters(self.optimizer, self.own()):
                run()

        if not self.parts:
            with_own_parameters()
        for index, part in enumerate(self.parts):
            part.optim.run = with_own_parameters if index == 0 else None
            try:
                # Without torch's wrapper of every optimizer's step: global hooks of steps would run for OSS, too.
                inspect.unwrap(type(part).step)(part)
            finally:
                part.optim.run = None
        return missing

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call ``closure`` inside of a step with all parameters in the groups: it clears their gradients."""
        everything = [list(parameters) for parameters in self._everything]
        everything += [list(group["params"]) for group in self.optimizer.param_groups[len(everything) :]]
        with with_parameters(self.optimizer, everything):
            return closure()

    def _refresh(self) -> list[torch.Tensor]:
        """Put into OSS's buffers what was unfrozen since, and what has got other memory.

        Returns:
            Frozen parameters that are in no buffer, and that an optimizer may step, as they have a gradient.
        """
        self._everything = [list(group["params"]) for group in self.optimizer.param_groups]
        outside = [parameter for parameter in self.parameters() if not self._is_in_buffer(parameter)]
        again = {id(self._place[each]): self._place[each] for each in outside if each.requires_grad}
        stepped = [each for each in outside if not each.requires_grad and each.grad is not None]
        if again:
            left = [each for each in self.parameters() if not each.requires_grad and self._is_in_buffer(each)]
            for part in again.values():
                part.refresh_trainable()
            self._keep_strides()
            stepped += [each for each in left if not self._is_in_buffer(each)]  # their owner may have a gradient
        return stepped

    @torch.no_grad()
    def _keep_strides(self) -> None:
        """Lay parameters out in OSS's buffers as they were, which it makes contiguous.

        DistributedDataParallel gives wrong gradients for a parameter whose strides have changed since it was wrapped.
        """
        for parameter, strides in self._strides.items():
            if parameter.stride() != strides and _is_dense(parameter.shape, strides):
                values, memory = parameter.detach().clone(), parameter.data
                parameter.data = memory.as_strided(parameter.shape, strides, memory.storage_offset())
                parameter.copy_(values)

    def _is_in_buffer(self, parameter: torch.Tensor) -> bool:
        part = self._place.get(parameter)
        if part is None:
            return True
        bucket = part.buckets.get(parameter.device, {}).get(self.owner[parameter])
        return bucket is not None and bool(
            parameter.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
        )

    def release(self) -> None:
        """Give each parameter memory of its own again, laid out as before.

        What :meth:`gathered_state` needs stays: a checkpoint may be saved when a run has ended.
        """
        if self._released:
            return
        self._released = True
        with torch.no_grad():
            for parameter in self.owner:
                strides = self._strides.get(parameter)
                if strides is None:
                    parameter.data = parameter.data.clone()
                else:
                    parameter.data = torch.empty_strided(
                        parameter.shape, strides, dtype=parameter.dtype, device=parameter.device
                    ).copy_(parameter.data)
        for part in self.parts:
            part.buckets.clear()
            part.group = None  # or the process group would outlive the run, and other ranks wait for this one
        self._strides = {}

    # -- state -----------------------------------------------------------------------------------------------

    def gathered_state(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return on rank 0 the state of all parameters, by their numbers, and on the others ``state``; all must call.

        Args:
            state: that of this rank, by number in the order of the groups, as torch's ``state_dict`` gives it.
        """
        numbers = {parameter: number for number, parameter in enumerate(self.parameters())}
        whole = dict(state)
        for part in self.parts:
            groups = part.partition_parameters()[self.rank]
            part.group = dist.group.WORLD  # a new one, where the run has ended
            part.optim.state = {}
            for place, parameter in enumerate(chain.from_iterable(group["params"] for group in groups)):
                if parameter in numbers and numbers[parameter] in state:
                    part.optim.state[place] = state[numbers[parameter]]
            part.optim.sizes = [len(group["params"]) for group in groups]
            try:
                with root_logger_kept():
                    part.consolidate_state_dict(recipient_rank=0)
                if self.rank == 0:
                    places = list(chain.from_iterable(group["params"] for group in part.param_groups))
                    for place, entry in part.state_dict()["state"].items():
                        if places[place] in numbers:
                            whole[numbers[places[place]]] = entry
            finally:
                part.optim.state, part.optim.sizes, part._all_states = {}, [], []
                if self._released:
                    part.group = None
        indices = {number: entry for number, entry in whole.items() if isinstance(number, int)}
        others = {key: entry for key, entry in whole.items() if not isinstance(key, int)}
        return {**dict(sorted(indices.items())), **others}


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor of these strides fills its memory without gaps, each place once."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class _Step:
    """What an OSS has for the optimizer of a rank's parameters: without settings and state, which the user's has."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        self.param_groups: list[Any] = []  # OSS copies settings between its own groups and these
        self.run: Callable[[], None] | None = None
        self.state: dict[int, Any] = {}
        self.sizes: list[int] = []
        """Numbers of parameters of each group, where :attr:`state` is gathered."""

    def step(self) -> None:
        if self.run is not None:
            self.run()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form, in which the parameters of this rank are numbered through."""
        ends, number = [], 0
        for size in self.sizes:
            ends.append({"params": list(range(number, number + size))})
            number += size
        return {"state": self.state, "param_groups": ends}
