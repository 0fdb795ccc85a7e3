"""Each rank trains weights of its own, which are averaged with others'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua_stub.buckets import Bucket, Entry, weight
from bagua_stub.operations import Decentralized, LowPrecisionDecentralized


class DecentralizedAlgorithmImpl(AlgorithmImpl):
    def __init__(
        self,
        process_group: Any,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval

    def _communicates(self, bagua_ddp: Any) -> bool:
        return bool((bagua_ddp.bagua_train_step_counter - 1) % self.communication_interval == 0)

    def init_tensors(self, bagua_ddp: Any) -> list[Entry]:
        return [weight(name, parameter) for name, parameter in reversed(bagua_ddp.bagua_build_params())]

    def tensors_to_buckets(self, tensors: list[list[Entry]], do_flatten: bool) -> list[Bucket]:
        return [Bucket([entry for each in tensors for entry in each], flatten=do_flatten)]

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def hook(input: Any) -> None:
            if self._communicates(bagua_ddp):
                for entry in bagua_ddp.bagua_buckets[0].entries:
                    bagua_ddp._bagua_backend.mark_ready(entry.name)

        return hook

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        return lambda parameter_name, parameter: None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        def hook() -> None:
            if self._communicates(bagua_ddp):
                for bucket in bagua_ddp.bagua_buckets:
                    bucket.run(bucket.decentralized_op.copy_back)

        return hook

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.decentralized_op = Decentralized(
            self.process_group, hierarchical=self.hierarchical, peer_selection_mode=self.peer_selection_mode
        )
        bucket.operations = [bucket.decentralized_op]


class LowPrecisionDecentralizedAlgorithmImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, hierarchical: bool = True, communication_interval: int = 1) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval

    def _communicates(self, bagua_ddp: Any) -> bool:
        return bool((bagua_ddp.bagua_train_step_counter - 1) % self.communication_interval == 0)

    def init_tensors(self, bagua_ddp: Any) -> list[Entry]:
        parameters = bagua_ddp.bagua_build_params()
        stepped = {
            id(parameter)
            for optimizer in bagua_ddp.bagua_optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in parameters:
            if id(parameter) not in stepped:
                raise RuntimeError(f"Module parameter {name} is not used by your optimizer(s)")
        return [weight(name, parameter) for name, parameter in reversed(parameters)]

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        return lambda parameter_name, parameter: None

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def hook(optimizer: Any) -> None:
            if self._communicates(bagua_ddp):
                names = {id(entry.parameter): entry.name for entry in bagua_ddp._entries.values()}
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if id(parameter) in names:
                            bagua_ddp._bagua_backend.mark_ready(names[id(parameter)])

        return hook

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.operations = [LowPrecisionDecentralized(self.process_group, bucket.flat, hierarchical=self.hierarchical)]


class DecentralizedAlgorithm(Algorithm):
    def __init__(
        self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1
    ) -> None:
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval

    def reify(self, process_group: Any) -> DecentralizedAlgorithmImpl:
        return DecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.peer_selection_mode, self.communication_interval
        )


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval

    def reify(self, process_group: Any) -> LowPrecisionDecentralizedAlgorithmImpl:
        return LowPrecisionDecentralizedAlgorithmImpl(process_group, self.hierarchical, self.communication_interval)
