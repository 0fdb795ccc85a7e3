"""Count the bytes of tensors on a device while fake operators run, by phase and by module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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


class _Storage:
    """One storage that is counted.

    Args:
        size: in bytes, as the allocator rounds it.
        kind: ``"activation"``, ``"gradient"`` or ``"held"``: parameters, buffers, state and the batch.
        module: name of the module that computed when it was made.
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
        self._alive: set[_Storage] = set()
        self.bytes = {"activation": 0, "gradient": 0, "held": 0}
        self._phase: Phase = "forward"
        self._stack: list[str] = []
        self._backward_of = ""
        self.moments: list[Moment] = []
        self.saved: dict[str, int] = {}
        """Bytes of activations when the forward last ended, by the module that has made them."""
        self.results: dict[str, int] = {}
        """Bytes of what each module has returned in a forward."""
        self.outputs = 0
        """Bytes of activations that were left when the optimizer last began."""
        self._handles: list[Any] = []

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
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        found: _Storage | None = self._storages.get(storage)  # type: ignore[no-untyped-call]
        if found is None:
            found = _Storage(self.size_of(tensor), "activation", self._module)
            self._storages[storage] = found
            self._alive.add(found)
            weakref.finalize(storage, self._free, found)
            self.bytes["activation"] += found.size
            self._note()
        elif (size := self.size_of(tensor)) != found.size and found in self._alive:
            self.bytes[found.kind] += size - found.size
            found.size = size
            self._note()
        return found

    def _free(self, storage: _Storage) -> None:
        self._alive.discard(storage)
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

    def _note(self) -> None:
        """Keep the present use of memory if it is the greatest of this module in this phase."""
        now = Moment(self._phase, self._module, self.bytes["activation"], self.bytes["gradient"])
        last = self.moments[-1] if self.moments else None
        if last is None or (last.phase, last.module) != (now.phase, now.module):
            self.moments.append(now)
        elif now.activations + now.gradients >= last.activations + last.gradients:
            self.moments[-1] = now  # of equals the later one, in which a temporary has become a gradient

    def begin(self, phase: Phase) -> None:
        """Begin a phase; at the end of the forward, note what is saved for the backward."""
        if phase == "backward":
            self.saved = {}
            for storage in self._alive:
                if storage.kind == "activation":
                    self.saved[storage.module] = self.saved.get(storage.module, 0) + storage.size
        elif phase == "optimizer":
            self.outputs = self.bytes["activation"]
        self._phase, self._backward_of = phase, ""
        self._stack.clear()
        self._note()

    def restart(self) -> None:
        """Forget all moments: a second step begins."""
        self.moments.clear()

    # -- modules ---------------------------------------------------------------------------------------------

    def watch(self, module: nn.Module) -> None:
        """Follow the calls of the submodules of ``module`` and the gradients of its parameters, by hooks on them."""
        for name, submodule in module.named_modules():
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
        self._note()

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()
        if self._phase == "forward":
            self._returned(name, module, args, output)
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(self._backward_hook(name))  # type: ignore[no-untyped-call]

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.results[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _backward_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def begin(_: torch.Tensor) -> None:
            self._backward_of = name
            self._note()

        return begin

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.device.type == self._device_type:
            self._set_kind(parameter.grad, "gradient")
            self._note()
