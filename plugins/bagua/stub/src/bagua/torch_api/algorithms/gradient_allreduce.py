"""The mean of the gradients."""

from __future__ import annotations

from typing import Any

from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua_stub.operations import Centralized


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, hierarchical: bool = False, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average

    def init_operations(self, _: Any, bucket: Any) -> None:
        bucket.operations = [Centralized(self.process_group, hierarchical=self.hierarchical, average=self.average)]


class GradientAllReduceAlgorithm(Algorithm):
    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: Any) -> GradientAllReduceAlgorithmImpl:
        return GradientAllReduceAlgorithmImpl(process_group, hierarchical=self.hierarchical, average=self.average)
