"""Count the bytes of tensors on a device while fake operators run, by phase and by module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from torchhal.step_memory import Moment, Phase

BLOCK: Final = 512
"""Allocators of accelerators round up to this many bytes."""

_aten = torch.ops.aten

_REDUCED_IN_PLACE: Final = {
    _aten.mse_loss.default: 2,
    _aten.smooth_l1_loss.default: 2,
    _aten.soft_margin_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
}
"""Losses whose kernels compute all elements in the memory of their result, which keeps it when it becomes one number,
with the place of their ``reduction``. On fake tensors they have the memory of that number alone."""


class _Storage:
    """One storage that is counted.

    Args:
        size: in bytes, as the allocator rounds it.
        kind: ``"activation"``, ``"gradient"`` or ``"held"``: parameters, buffers, state and the batch.
        module: name of the module that has made it; see :attr:`MemoryCounter.saved`.
    """

    __slots__ = ("kind", "module", "size")

    def __init__(self, size: int, kind: str, module: str) -> None:
        self.size, self.kind, self.module = size, kind, module


class MemoryCounter(TorchDispatchMode):
    """Counts each storage that operators return on a device, from its first tensor until its last one is freed.

    ``torch.distributed._tools.MemTracker`` does so too, but it rounds for one device type alone, refuses modules that
    are called twice in a step, and has no timeline.

    Args:
        device_type: of the device.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._block = 1 if device_type == "cpu" else BLOCK
        self._storages = WeakIdKeyDictionary()
        self._alive: dict[_Storage, None] = {}
        self.bytes = {"activation": 0, "gradient": 0, "held": 0}
        self._phase: Phase = "forward"
        self._stack: list[str] = []
        self._with_parameters: set[str] = set()
        """Names of the modules that have any."""
        self._last = ""
        """Of the modules with parameters of their own, the one that was called last."""
        self._backward_of = ""
        self.moments: list[Moment] = []
        self.saved: dict[str, int] = {}
        """Bytes of activations when the forward last ended, by the module that has made them, in their order.

        Of what is computed between the calls of modules by the one with parameters that was called last: a model that
        is cut between two of them has it on that side.
        """
        self.results: dict[str, int] = {}
        """Bytes of what each module has returned in a forward."""
        self.result_elements = 0
        """Floating-point numbers in what the model has returned."""
        self.outputs = 0
        """Bytes of activations that were left when the optimizer last began."""
        self._handles: list[Any] = []
        self._seen = WeakIdKeyDictionary()
        """Versions of the tensors that modules were called with or have returned: the first one has made them."""

    # -- tensors ---------------------------------------------------------------------------------------------

    def size_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes that an allocator takes for the storage of ``tensor``."""
        return -(-tensor.untyped_storage().nbytes() // self._block) * self._block

    def hold(self, tensors: Iterable[Any]) -> int:
        """Count ``tensors`` as held, not as activations; return the bytes of those that were not yet."""
        before = self.bytes["held"]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device_type:
                self._set_kind(tensor, "held")
        return self.bytes["held"] - before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _REDUCED_IN_PLACE:
            _enlarge(result, args, _REDUCED_IN_PLACE[func])
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        found: _Storage | None = self._storages.get(storage)  # type: ignore[no-untyped-call]
        if found is None:
            found = _Storage(self.size_of(tensor), "activation", self._maker)
            self._storages[storage] = found
            self._alive[found] = None
            weakref.finalize(storage, self._free, found)
            self.bytes["activation"] += found.size
            self._note()
        elif (size := self.size_of(tensor)) != found.size and found in self._alive:
            self.bytes[found.kind] += size - found.size
            found.size = size
            self._note()
        return found

    def _free(self, storage: _Storage) -> None:
        self._alive.pop(storage, None)
        self.bytes[storage.kind] -= storage.size

    def _set_kind(self, tensor: torch.Tensor, kind: str) -> None:
        storage = self._count(tensor)
        self.bytes[storage.kind] -= storage.size
        storage.kind = kind
        self.bytes[kind] += storage.size

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def _module(self) -> str:
        return self._stack[-1] if self._stack else (self._backward_of if self._phase == "backward" else "")

    @property
    def _maker(self) -> str:
        around = next((name for name in reversed(self._stack) if name in self._with_parameters), "")
        return self._last if not around or self._last.startswith(f"{around}.") else around

    def _note(self) -> None:
        """Keep the present use of memory if it is the greatest of this module in this phase."""
        now = Moment(self._phase, self._module, self.bytes["activation"], self.bytes["gradient"])
        last = self.moments[-1] if self.moments else None
        if last is None or (last.phase, last.module) != (now.phase, now.module):
            self.moments.append(now)
        elif now.activations + now.gradients >= last.activations + last.gradients:
            self.moments[-1] = now  # of equals the later one, in which a temporary has become a gradient

    def _note_begin(self) -> None:
        """Keep the present use of memory as that with which a module begins, beside the greatest."""
        now = Moment(self._phase, self._module, self.bytes["activation"], self.bytes["gradient"])
        self.moments += [now, now]

    def begin(self, phase: Phase) -> None:
        """Begin a phase; at the end of the forward, note what is saved for the backward."""
        if phase == "backward":
            self.saved = {}
            for storage in self._alive:
                if storage.kind == "activation":
                    self.saved[storage.module] = self.saved.get(storage.module, 0) + storage.size
        elif phase == "optimizer":
            self.outputs = self.bytes["activation"]
        self._phase, self._backward_of, self._last = phase, "", ""
        self._stack.clear()
        self._note()

    def restart(self) -> None:
        """Forget all moments: a second step begins."""
        self.moments.clear()

    # -- modules ---------------------------------------------------------------------------------------------

    def watch(self, module: nn.Module) -> None:
        """Follow the calls of the submodules of ``module`` and the gradients of its parameters, by hooks on them."""
        for name, submodule in module.named_modules():
            if any(True for _ in submodule.parameters()):
                self._with_parameters.add(name)
            if not name:
                self._handles.append(submodule.register_forward_hook(partial(self._returned, name)))
            else:
                self._handles.append(submodule.register_forward_pre_hook(partial(self._enter, name), prepend=True))
                self._handles.append(submodule.register_forward_hook(partial(self._leave, name), always_call=True))
        for parameter in module.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)
        if module._parameters:
            self._last = name
        self._note_begin()
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.Tensor):
                self._is_new(leaf)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()
        if self._phase == "forward":
            self._returned(name, module, args, output)
            for leaf in tree_leaves(output):
                if not isinstance(leaf, torch.Tensor) or not self._is_new(leaf):
                    continue  # what it was called with, or a module inside of it has made
                if leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(self._backward_hook(name))  # type: ignore[no-untyped-call]

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Return whether no module has had ``tensor`` as it is before; one that overwrites it makes another."""
        before, self._seen[tensor] = self._seen.get(tensor), tensor._version  # type: ignore[no-untyped-call]
        return bool(before != tensor._version)

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.results[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if not name:
            self.result_elements = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())

    def _backward_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def begin(_: torch.Tensor) -> None:
            self._backward_of = name
            self._note_begin()

        return begin

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.device.type == self._device_type:
            self._set_kind(parameter.grad, "gradient")
            self._note()


def _enlarge(loss: torch.Tensor, args: Sequence[Any], place: int) -> None:
    """Give ``loss`` the memory of all elements, unless they are what the operator returns.

    Args:
        loss: what the operator has returned for ``args``.
        args: without those that have their default, as the dispatcher gives them.
        place: of the reduction among them, a mean by default.
    """
    if len(args) <= place or args[place] != 0:
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        loss.untyped_storage().resize_(elements.numel() * loss.element_size())
