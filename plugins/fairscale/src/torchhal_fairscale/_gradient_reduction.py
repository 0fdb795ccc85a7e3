"""Reduce each gradient to the rank that steps its parameter, with fairscale's ShardedDataParallel."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchhal.distributed import collectives
from torchhal.errors import DistributedError
from torchhal_fairscale._sdk import root_logger_kept

_requires_grad = attrgetter("requires_grad")


class GradientReduction:
    """The ShardedDataParallel around a model, with what it leaves to its user.

    It is made without buckets: their gradients are views of them, which ``optimizer.zero_grad()`` drops, and then zeros
    are reduced in silence. Broadcasting of buffers and looking for frozen parameters are the strategy's.

    What ranks send at the same time is added up, whatever it is, so they compare in which order backward has reached
    the parameters. The first backward sends nothing until then, for a mistake in the model is mostly there in it. Later
    ones send while they run.

    Args:
        model: the module, or the precision's wrapper of it.
        parts: the OSS objects of all optimizers.
        finds_unused: parameters may lack a gradient, on some ranks or on all: gradients are reduced after backward.
        device: of this rank.
        names: of the parameters.
        explain_unused: returns the error for parameters without a gradient, given their names.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Any],
        *,
        finds_unused: bool,
        device: torch.device,
        names: dict[nn.Parameter, str],
        explain_unused: Callable[[Sequence[str]], Exception],
    ) -> None:
        from fairscale.nn import ShardedDataParallel

        with root_logger_kept():
            self.wrapper: Any = ShardedDataParallel(
                model,
                list(parts),
                broadcast_buffers=False,
                sync_models_at_startup=False,
                reduce_buffer_size=0,
                auto_refresh_trainable=False,
            )
        self._finds_unused = finds_unused
        self._host = collectives.host(device)
        self._names = names
        self._explain_unused = explain_unused
        self._seen: set[int] = set()
        self._order: list[int] = []
        """The parameters whose gradients were accumulated in this backward, in their order."""
        self._is_first = True
        """True until a backward has reached all parameters in one order on all ranks."""
        self._notes_order = False
        self._hooks: list[Any] = []
        self._trained: list[bool] = []
        self.refresh()

    @property
    def is_paused(self) -> bool:
        """True while forward and backward send nothing, as in the wrapper's ``no_sync()``, which an error leaves on."""
        return bool(self.wrapper._should_accumulate_grads)

    @is_paused.setter
    def is_paused(self, paused: bool) -> None:
        self.wrapper._should_accumulate_grads = paused

    def changed(self) -> list[nn.Parameter]:
        """Return what was frozen or unfrozen since the last :meth:`refresh`."""
        now = list(map(_requires_grad, self.wrapper._all_params))
        if now == self._trained:
            return []
        return [one for one, a, b in zip(self.wrapper._all_params, now, self._trained, strict=True) if a != b]

    def refresh(self) -> None:
        """Reduce the gradients of the parameters that are trained now."""
        self._trained = list(map(_requires_grad, self.wrapper._all_params))
        self.wrapper.training = True  # in eval mode, of the model or the wrapper alone, it would reduce nothing
        self.wrapper._grad_to_be_reduced = []  # those of an accumulation wait there, of which it would warn
        self.wrapper.refresh_trainable()
        self._is_first = True
        self._remove_hooks()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated(index))
            for index, parameter in enumerate(self.wrapper._trainable_params)
        ]

    def remove(self) -> None:
        """Take all hooks from the parameters, and let go of the process group, which closes its connections."""
        self._remove_hooks()
        while self.wrapper._grad_hooks:
            self.wrapper._grad_hooks.pop().remove()
        self.wrapper._grad_accs, self.wrapper._manual_reduce, self.wrapper._sharded_optimizers = [], [], []
        self.wrapper._work_handles.clear()
        self.wrapper._process_group = None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _accumulated(self, index: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            if not self._notes_order:
                return
            if index in self._seen:
                raise DistributedError(
                    f"parameter {self._name(index)!r} got a second gradient in one backward, while the first was "
                    "on its way to the rank that steps it, as one does that is used in several checkpointed layers: "
                    "use find_unused_parameters=True, which sends gradients after backward, or strategy='fairscale_oss'"
                )
            self._seen.add(index)
            self._order.append(index)

        return note

    def _name(self, index: int) -> str:
        return self.name_of(self.wrapper._trainable_params[index])

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter in the module."""
        return self._names.get(parameter, "a parameter")

    def backward(self, run: Callable[[], None]) -> bool:
        """Call ``run``, which computes the gradients; return whether they were reduced.

        Raises:
            DistributedError: parameters lack a gradient, or ranks have sent theirs in different orders.
        """
        self._order, self._seen = [], set()
        if self.is_paused:
            run()
            return False
        self._notes_order = not self._finds_unused
        try:
            if self._finds_unused or self._is_first:
                self._send_after(run)
            else:
                self._send_during(run)
        finally:
            self._notes_order = False
        return True

    def _send_after(self, run: Callable[[], None]) -> None:
        self.is_paused = True
        try:
            run()
        finally:
            self.is_paused = False
        if not self._finds_unused:
            self._check_all_there()
            self._check_order()
            self._is_first = False
        self.reduce()

    def _send_during(self, run: Callable[[], None]) -> None:
        # Each gradient is sent once after a forward, and this may be another backward of the same one.
        self.wrapper.training = True
        self.wrapper._clear_counters()
        # It would wait when backward ends, for ever where a parameter of another rank has no gradient here; and where a
        # checkpointed layer's backward, which runs inside of this one, ends, but not for what is sent after that.
        vars(self.wrapper)["_flush_reduce_calls"] = _nothing
        try:
            run()
        finally:
            del vars(self.wrapper)["_flush_reduce_calls"]
        self._check_all_there()
        self.wrapper._flush_reduce_calls()
        self._check_order()

    def _check_all_there(self) -> None:
        trained = len(self.wrapper._trainable_params)
        if len(self._order) < trained:
            missing = [index for index in range(trained) if index not in self._seen]
            raise self._explain_unused(list(map(self._name, missing)))

    def _check_order(self) -> None:
        """Raise on every rank if some have sent their gradients in another order: other gradients were added up."""
        checksum = zlib.crc32(repr(self._order).encode())
        both = torch.tensor([checksum, -checksum], device=self._host)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if int(both[0]) != -int(both[1]):
            raise DistributedError(
                "backward reached the parameters in another order on some ranks than on others, and "
                "ShardedDataParallel adds up what they send at the same time: use find_unused_parameters=True, which "
                "sends gradients after backward, or strategy='fairscale_oss'"
            )

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what was accumulated, in the same order on every rank; leave out what no rank has a gradient of."""
        parameters = self.wrapper._trainable_params
        there = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        there = there.to(self._host)
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        anywhere = [bool(each) for each in there.tolist()]
        for parameter, is_there in zip(parameters, anywhere, strict=True):
            if is_there and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if any(anywhere):
            self.wrapper._grad_to_be_reduced = anywhere
            self.wrapper.reduce()


def _nothing() -> None: ...
