"""The mean of the gradients, sent in bytes."""

from __future__ import annotations

from typing import Any

from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua_stub.buckets import Bucket, Entry
from bagua_stub.operations import CompressedCentralized


class ByteGradAlgorithmImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average

    def tensors_to_buckets(self, tensors: list[list[Entry]], do_flatten: bool) -> list[Bucket]:
        ranks = self.process_group.get_global_communicator().nranks()
        return [Bucket(each, flatten=do_flatten, alignment=ranks) for each in tensors]

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.operations = [
            CompressedCentralized(self.process_group, hierarchical=self.hierarchical, average=self.average)
        ]


class ByteGradAlgorithm(Algorithm):
    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: Any) -> ByteGradAlgorithmImpl:
        return ByteGradAlgorithmImpl(process_group, hierarchical=self.hierarchical, average=self.average)
