"""Divide the step of a user's optimizer among the ranks with fairscale's OSS."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.distributed import collectives
from torchhal.strategies.sharded_optimizers import with_parameters
from torchhal_fairscale._sdk import root_logger_kept
from torchhal_fairscale._state_transfer import placed, send_entries


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

    def bring_state(self, device: torch.device) -> None:
        """Let the rank that steps a parameter have its state alone, which an earlier run may have left on another.

        All must call. Who steps a parameter depends on what was trained when a run began.

        Args:
            device: of this rank.
        """
        parameters, state = list(self.parameters()), self.optimizer.state
        mine = {number: state[each] for number, each in enumerate(parameters) if state.get(each)}
        holders = collectives.all_gather_object(sorted(mine), name="places of the optimizer's state")
        routes = []
        for number, parameter in enumerate(parameters):
            there = [rank for rank, held in enumerate(holders) if number in held]
            if there and self.owner[parameter] not in there:
                routes.append((number, there[0], self.owner[parameter]))
        come = send_entries(mine, routes, collectives.host(device))
        for number, entry in come.items():
            state[parameters[number]] = placed(entry, parameters[number].device)
        for number in mine:
            if self.owner[parameters[number]] != self.rank:
                del state[parameters[number]]

    def gathered_state(self, state: Mapping[Any, Any], device: torch.device) -> dict[Any, Any]:
        """Return on rank 0 the state of all parameters, by their numbers, and on the others ``state``; all must call.

        Args:
            state: that of this rank, by number in the order of the groups, as torch's ``state_dict`` gives it.
            device: of this rank.
        """
        owners = [self.owner.get(parameter, 0) for parameter in self.parameters()]
        mine = {number: state[number] for number, owner in enumerate(owners) if owner == self.rank and number in state}
        holders = collectives.all_gather_object(sorted(mine), name="gathering of the optimizer's state")
        routes = [(number, rank, 0) for rank, held in enumerate(holders) if rank for number in held]
        come = send_entries(mine, routes, collectives.host(device))
        if self.rank:
            return dict(state)
        others = {key: entry for key, entry in state.items() if not isinstance(key, int)}
        whole = mine | {number: placed(entry, torch.device("cpu")) for number, entry in come.items()}
        return {**dict(sorted(whole.items())), **others}


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
    """The optimizer of an OSS object: it lets the user's step, and has no settings and state of its own."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        self.param_groups: list[Any] = []  # OSS copies settings between its own groups and these
        self.run: Callable[[], None] | None = None

    def step(self) -> None:
        if self.run is not None:
            self.run()
