"""Override forwards of a user's module, and make it an ordinary module again after a run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from torchhal_parallel._gradient_hooks import give_back
from torchhal_parallel._parameter_objects import ParameterObjects, made_of, marks_of
from torchhal_parallel._wrap_policy import chosen_blocks

try:
    from torch.distributed._composable_state import _module_state_mapping as _STATES
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has no torch.distributed._composable_state._module_state_mapping, without which a "
        "model would not be an ordinary one again after a run: use another torch, or another torchhal-parallel"
    ) from error

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class ForwardOverride:
    """A replacement of the forward of ``module`` until :meth:`remove`; ``inner`` is the one that it had."""

    def __init__(self, module: nn.Module) -> None:
        self.remove(module)
        self.inner = module.forward
        self._before = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    @classmethod
    def remove(cls, module: nn.Module) -> None:
        """Give ``module`` back the forward that it had, if one of this class stands in for it."""
        found = module.__dict__.get("forward")
        if isinstance(found, cls):
            if found._before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = found._before


class Recomputed(ForwardOverride):
    """A forward whose activations are not kept: backward computes them again, but for the statistics of batch norms."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._normed = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        self._options: dict[str, Any] = {"context_fn": self._contexts} if self._normed else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **self._options, **kwargs)

    def _contexts(self) -> tuple[Any, Any]:
        """Return the contexts of the first forward, and of the one in backward."""
        return contextlib.nullcontext(), self._without_statistics()

    @contextlib.contextmanager
    def _without_statistics(self) -> Iterator[None]:
        """Let copies take the running statistics, which have this batch already: torch wants the same tensors saved."""
        kept = [(part, dict(part._buffers)) for part in self._normed if part.training and part.track_running_stats]
        for part, buffers in kept:
            part._buffers.update({name: None if each is None else each.clone() for name, each in buffers.items()})
        try:
            yield
        finally:
            for part, buffers in kept:
                part._buffers.update(buffers)


def recompute(module: nn.Module, policy: Any) -> None:
    """Recompute the activations of the submodules that ``policy`` chooses, including those that share modules.

    Names and parameters stay as they are.
    """
    for block in chosen_blocks(module, policy).values():
        Recomputed(block)


class ModuleSnapshot:
    """The state of a module before it was wrapped: made before, restored after the run.

    ``fully_shard`` changes classes and keeps state in the modules; it and ``parallelize_module`` register hooks, some
    at the first step. Hooks of the user's, whenever they came, stay.
    """

    def __init__(self, module: nn.Module, objects: ParameterObjects) -> None:
        self._objects = objects
        self._before = [
            (
                submodule,
                type(submodule),
                set(submodule.__dict__),
                {name: set(_hooks(submodule, name)) for name in _HOOKS},
            )
            for submodule in module.modules()
        ]
        self._names = [
            *by_identity(module.named_parameters(remove_duplicate=False)),
            *by_identity(module.named_buffers(remove_duplicate=False)),
        ]

    def restore(self, module: nn.Module, whole: dict[str, Any]) -> None:
        """Make ``module`` what it was, with the tensors of ``whole``, by name, as its parameters and buffers.

        What training has removed stays away, and what it has added is restored too.
        """
        for submodule, before, attributes, hooks in self._before:
            submodule.__class__ = before
            ForwardOverride.remove(submodule)
            for name in set(submodule.__dict__) - attributes:
                if name == "_distribute_module_applied" or str(name).startswith("__composable_api_state_key"):
                    del submodule.__dict__[name]
            for name in _HOOKS:
                for key, hook in list(_hooks(submodule, name).items()):
                    if key not in hooks[name] and _is_of_a_wrapper(hook):
                        _forget(submodule, key)
            _STATES.pop(submodule, None)  # or torch refuses to shard the module again
        known = {name for names in self._names for name in names}
        for names in (*self._names, *([name] for name in whole if name not in known)):
            places = [(name, *_place(module, name)) for name in names if name in whole]
            if not places:
                continue
            name, owner, attribute = places[0]
            value = whole[name]
            now = owner._parameters.get(attribute)
            if now is not None:
                value = self._restored(now, value)
            for _, owner, attribute in places:
                setattr(owner, attribute, value)  # an LSTM keeps a list of its own

    def _restored(self, now: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
        """Return the parameter that the module had in the place of ``now``, with ``value``."""
        parameter = self._objects.object_for(now)
        if parameter is None or not torch._has_compatible_shallow_copy_type(parameter, value):
            parameter = nn.Parameter(value, requires_grad=now.requires_grad)  # it came while the model was trained
        elif made_of(parameter) or made_of(value):
            torch.utils.swap_tensors(parameter, nn.Parameter(value))  # type: ignore[no-untyped-call]
        else:
            parameter.grad, parameter.data = None, value
        parameter.requires_grad_(now.requires_grad)  # a callback may have unfrozen it
        vars(parameter).update(marks_of(now))
        for name in self._objects.torchs_marks:
            vars(parameter).pop(name, None)
        if parameter is not now:
            give_back(now, parameter)
        return parameter


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, attribute = name.rpartition(".")
    return module.get_submodule(owner), attribute


def by_identity(named: Any) -> list[list[str]]:
    """Return the names of each tensor, tied ones together."""
    found: dict[int, list[str]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), []).append(name)
    return list(found.values())


def _hooks(module: nn.Module, name: str) -> dict[Any, Any]:
    return getattr(module, name, None) or {}


def _forget(module: nn.Module, key: Any) -> None:
    for name in _HOOKS:
        _hooks(module, name).pop(key, None)


def _is_of_a_wrapper(hook: Any) -> bool:
    """Return whether a hook is torch's for parallelism, or one of this package that runs at a first forward."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "hook", hook)  # state dictionaries wrap theirs
    home = getattr(getattr(hook, "__func__", hook), "__module__", None) or type(hook).__module__
    return str(home).startswith(("torch.distributed", "torchhal_parallel"))
