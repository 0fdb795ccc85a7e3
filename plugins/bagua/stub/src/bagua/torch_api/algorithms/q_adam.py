"""Adam whose second moment stands still after a warm-up, from when on the first moments are averaged in bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua_stub.buckets import Bucket, Entry, gradient
from bagua_stub.operations import Centralized, CompressedCentralized


class QAdamOptimizer(Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value, good in (
            ("learning rate", lr, lr >= 0),
            ("epsilon value", eps, eps >= 0),
            ("beta parameter at index 0", betas[0], 0 <= betas[0] < 1),
            ("beta parameter at index 1", betas[1], 0 <= betas[1] < 1),
            ("warmup_steps parameter, must be larger than 0", warmup_steps, warmup_steps > 0),
        ):
            if not good:
                raise ValueError(f"Invalid {name}: {value}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.warmup_steps = warmup_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                step: int = state["step"]
                grad = parameter.grad
                if group["weight_decay"] != 0:
                    grad = grad.add(parameter, alpha=group["weight_decay"])
                if step < self.warmup_steps:
                    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                spread = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1**step))
        return loss


class QAdamAlgorithmImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.optimizer = q_adam_optimizer
        self.warmup_steps = q_adam_optimizer.warmup_steps

    @property
    def optimizer_step_id(self) -> int:
        parameter = self.optimizer.param_groups[0]["params"][0]
        return int(self.optimizer.state[parameter].get("step", 0))

    def need_reset(self) -> bool:
        return self.optimizer_step_id == self.warmup_steps

    def init_tensors(self, bagua_ddp: Any) -> list[Entry]:
        entries = super().init_tensors(bagua_ddp)
        if self.optimizer_step_id < self.warmup_steps:
            return entries
        return [self._momentum(entry.name, entry.parameter) for entry in entries]

    def _momentum(self, name: str, parameter: nn.Parameter) -> Entry:
        gradient(name, parameter)

        def write(tensor: torch.Tensor) -> None:
            self.optimizer.state[parameter]["exp_avg"] = tensor

        return Entry(name, parameter, lambda: self.optimizer.state[parameter]["exp_avg"], write)

    def tensors_to_buckets(self, tensors: list[list[Entry]], do_flatten: bool) -> list[Bucket]:
        ranks = self.process_group.get_global_communicator().nranks()
        return [Bucket(each, flatten=do_flatten, alignment=ranks) for each in tensors]

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        if self.optimizer_step_id < self.warmup_steps:
            bucket.operations = [Centralized(self.process_group, hierarchical=False, average=True)]
            return

        def calculate(flat: torch.Tensor) -> None:
            beta1, _ = self.optimizer.param_groups[0]["betas"]
            for entry in bucket.entries:
                entry.get().mul_(beta1).add_(entry.parameter.grad, alpha=1 - beta1)

        average = CompressedCentralized(self.process_group, hierarchical=self.hierarchical, average=True)
        bucket.operations = [calculate, average]

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        warm = self.optimizer_step_id >= self.warmup_steps

        def hook(parameter_name: str, parameter: nn.Parameter) -> None:
            entry = bagua_ddp._entries[parameter_name]
            now: Any = self.optimizer.state[parameter]["exp_avg"] if warm else parameter.grad
            assert now.data_ptr() == entry.get().data_ptr(), "bagua backend tensor data_ptr should match"
            bagua_ddp._bagua_backend.mark_ready(parameter_name)

        return hook


class QAdamAlgorithm(Algorithm):
    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        self.hierarchical = hierarchical
        self.optimizer = q_adam_optimizer

    def reify(self, process_group: Any) -> QAdamAlgorithmImpl:
        return QAdamAlgorithmImpl(process_group, q_adam_optimizer=self.optimizer, hierarchical=self.hierarchical)
