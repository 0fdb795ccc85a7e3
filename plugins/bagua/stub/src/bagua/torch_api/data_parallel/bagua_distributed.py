"""What hooks a module so that an algorithm runs with its forward, its backward and its optimizers' steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bagua.torch_api import env
from bagua.torch_api.communication import broadcast, broadcast_object
from bagua_stub import operations
from bagua_stub.buckets import Backend, Bucket, Entry, split


@cache
def _backend(module_name: str) -> Backend:
    return Backend()


class BaguaDistributedDataParallel:
    def __init__(
        self,
        module: Any,
        optimizers: list[Optimizer],
        algorithm: Any,
        process_group: Any,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        if find_unused_parameters:
            raise NotImplementedError(
                "bagua-stub doesn't follow Bagua's find_unused_parameters, whose buckets wait for the unused ones"
            )
        self.module = module
        self.bagua_module_name = bagua_module_name or ""
        self.bagua_optimizers = optimizers
        self.process_group = process_group
        self.bagua_algorithm = algorithm.reify(process_group)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.parameters_to_ignore: list[str] = [
            *getattr(module, "_bagua_params_and_buffers_to_ignore", ()),
            *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
        ]
        self.bagua_train_step_counter = 0
        self.bagua_buckets: list[Bucket] = []
        self.require_backward_grad_sync = True
        self._callback_queued = False
        self._entries: dict[str, Entry] = {}
        self._bagua_backend = _backend(self.bagua_module_name)
        if hasattr(module, "_bagua_states"):
            self._reset_algorithm_state()
        first = module.register_forward_pre_hook(self._before_forward)
        self.module._bagua_states = SimpleNamespace(autograd_hooks=[], framework_hooks=[first])
        self._init_algorithm()

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """Return what is communicated, under its module's name and its own with a point between, an empty one too."""
        found: dict[nn.Parameter, str] = {}
        for module_name, module in self.module.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{module_name}.{name}"
                if parameter.requires_grad and full not in self.parameters_to_ignore and parameter not in found:
                    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                        raise NotImplementedError("sparse gradient not supported yet")
                    found[parameter] = full
        return [(name, parameter) for parameter, name in found.items()]

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self.bagua_train_step_counter += 1
        if self.bagua_algorithm.need_reset() and module.training:
            self._init_algorithm()
        if module.training:
            self.bagua_algorithm.init_forward_pre_hook(self)(inputs)
        self._callback_queued = False

    def _init_algorithm(self) -> None:
        self._broadcast_parameters()
        entries: list[Entry] = self.bagua_algorithm.init_tensors(self)
        for entry in entries:
            known = getattr(entry.parameter, "_bagua_stub_name", None)
            name = self.bagua_module_name, entry.name
            assert known in (None, name), f"assigning a different name to existing bagua tensor is forbidden {known}"
            entry.parameter._bagua_stub_name = name  # type: ignore[attr-defined]
        self._entries = {entry.name: entry for entry in entries}
        lists = split(entries, env.get_default_bucket_size())
        self.bagua_buckets = self.bagua_algorithm.tensors_to_buckets(lists, self.gradient_as_bucket_view)
        for bucket in self.bagua_buckets:
            self.bagua_algorithm.init_operations(self, bucket)
        self._bagua_backend.register(self.bagua_buckets)
        self._hook_gradients()
        self._hook_optimizers()

    # -- rank 0's state for all ------------------------------------------------------------------------------

    @torch.no_grad()
    def _broadcast_parameters(self) -> None:
        for _, parameter in self.bagua_build_params():
            _broadcast_dense(parameter.data)
        for optimizer in self.bagua_optimizers:
            self._broadcast_optimizer_state(optimizer)

    def _broadcast_optimizer_state(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("cannot broadcast torch.optim.LBFGS state")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not optimizer.state:
            for parameter in parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return
        states = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
        for state in states:
            for _, value in sorted(state.items()):
                if isinstance(value, torch.Tensor):
                    _broadcast_dense(value)
        numbers = [{k: v for k, v in state.items() if not isinstance(v, torch.Tensor)} for state in states]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        theirs: Any = broadcast_object((numbers, groups))
        for state, number in zip(states, theirs[0], strict=True):
            state.update(number)
        for group, values in zip(optimizer.param_groups, theirs[1], strict=True):
            group.update(values)

    # -- hooks -----------------------------------------------------------------------------------------------

    def _hook_gradients(self) -> None:
        hooks = self.module._bagua_states.autograd_hooks
        for hook in hooks:
            hook.remove()
        hooks.clear()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                hook = accumulator.register_hook(self._gradient_hook(name, parameter))
                hook.accumulator = accumulator  # which lives no longer by itself
                hooks.append(hook)

    def _gradient_hook(self, name: str, parameter: nn.Parameter) -> Callable[..., None]:
        def hook(*unused: Any) -> None:
            if not self.require_backward_grad_sync:
                return
            self.bagua_algorithm.init_backward_hook(self)(name, parameter)
            if not self._callback_queued:
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
                self._callback_queued = True

        return hook

    def _after_backward(self) -> None:
        self.bagua_algorithm.init_post_backward_hook(self)()

    def _hook_optimizers(self) -> None:
        after = self.bagua_algorithm.init_post_optimizer_step_hook(self)
        for optimizer in self.bagua_optimizers:
            if not hasattr(optimizer, "_bagua_original_step"):
                optimizer._bagua_original_step = optimizer.step  # type: ignore[attr-defined]

            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                with operations.stream:
                    result = self._bagua_original_step(*args, **kwargs)
                after(self)
                return result

            optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def _reset_algorithm_state(self) -> None:
        states = self.module._bagua_states
        for hook in [*states.framework_hooks, *states.autograd_hooks]:
            hook.remove()
        states.autograd_hooks.clear()


def _broadcast_dense(tensor: torch.Tensor) -> None:
    dense = tensor.detach().contiguous()
    if dense.dtype is torch.float32 or dense.dtype in (torch.float16, torch.int64, torch.uint8):
        broadcast(dense)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)
