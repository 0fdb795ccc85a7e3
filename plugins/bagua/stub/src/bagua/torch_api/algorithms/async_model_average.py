"""Each rank trains for itself while a thread averages the weights of all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from enum import IntEnum
from typing import Any

from torch import nn

from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.communication import barrier, new_group
from bagua_stub.buckets import Bucket, Entry, weight
from bagua_stub.operations import AsynchronousAverage, Centralized


class _AsyncInternalState(IntEnum):
    NEW = 0
    SCHEDULED = 1
    STARTED = 2
    STOPPED = 3


_GOING = (_AsyncInternalState.SCHEDULED, _AsyncInternalState.STARTED)


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    def __init__(
        self,
        process_group: Any,
        peer_selection_mode: str = "all",
        sync_interval_ms: int = 500,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(process_group)
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.step_id = 0
        self.warmup_steps = warmup_steps
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.cv = threading.Condition()
        self.notified = False
        self.status = _AsyncInternalState.NEW
        self.thread_group = new_group(process_group.ranks)

    def need_reset(self) -> bool:
        self.step_id += 1
        return self.warmup_steps > 0 and self.step_id == self.warmup_steps + 1

    def init_tensors(self, bagua_ddp: Any) -> list[Entry]:
        if self.step_id < self.warmup_steps:
            return super().init_tensors(bagua_ddp)
        return [weight(name, parameter) for name, parameter in reversed(bagua_ddp.bagua_build_params())]

    def tensors_to_buckets(self, tensors: list[list[Entry]], do_flatten: bool) -> list[Bucket]:
        assert do_flatten, "Async algorithm supports `do_flatten=True` only"
        if self.step_id < self.warmup_steps:
            return super().tensors_to_buckets(tensors, do_flatten)
        return [Bucket([entry for each in tensors for entry in each], flatten=True)]

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        if self.step_id < self.warmup_steps:
            bucket.operations = [Centralized(self.thread_group, hierarchical=False, average=True)]
            return
        bucket.async_op = AsynchronousAverage(self.thread_group)
        bucket.operations = [bucket.async_op]

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def hook(input: Any) -> None:
            if self.step_id <= self.warmup_steps or self.sync_interval_ms <= 0:
                return
            if self.status == _AsyncInternalState.NEW:
                self.future = self.executor.submit(self._average, bagua_ddp)
                self.status = _AsyncInternalState.SCHEDULED
            elif self.status == _AsyncInternalState.SCHEDULED and self.future.running():
                self._notify()
                self.status = _AsyncInternalState.STARTED
            for bucket in bagua_ddp.bagua_buckets:
                bucket.async_op.lock_weight()

        return hook

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        def hook(parameter_name: str, parameter: nn.Parameter) -> None:
            if self.step_id <= self.warmup_steps:
                bagua_ddp._bagua_backend.mark_ready(parameter_name)

        return hook

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        def hook() -> None:
            if self.step_id > self.warmup_steps:
                for bucket in bagua_ddp.bagua_buckets:
                    bucket.async_op.unlock_weight()

        return hook

    def _notify(self) -> None:
        with self.cv:
            self.notified = True
            self.cv.notify()

    def _average(self, bagua_ddp: Any) -> None:
        with self.cv:
            while not self.notified:
                self.cv.wait()
        while self._goes_on(bagua_ddp):
            for bucket in bagua_ddp.bagua_buckets:
                bucket.communicate()
            time.sleep(self.sync_interval_ms / 1000)

    def _goes_on(self, bagua_ddp: Any) -> bool:
        operation = getattr(bagua_ddp.bagua_buckets[0], "async_op", None)
        return operation is not None and operation.get_status()

    def abort(self, bagua_ddp: Any) -> None:
        """Stop averaging; every rank calls it."""
        bagua_ddp = getattr(bagua_ddp, "inner", bagua_ddp)
        if self.status in _GOING:
            barrier(comm=self.process_group.get_global_communicator())
            if bagua_ddp.bagua_buckets[0].async_op is not None:
                bagua_ddp.bagua_buckets[0].async_op.abort()
            self._notify()
            wait([self.future])
            self.status = _AsyncInternalState.STOPPED

    def resume(self, bagua_ddp: Any) -> None:
        """Go on averaging; every rank calls it."""
        bagua_ddp = getattr(bagua_ddp, "inner", bagua_ddp)
        if self.status not in _GOING:
            barrier(comm=self.process_group.get_global_communicator())
            if bagua_ddp.bagua_buckets[0].async_op is not None:
                bagua_ddp.bagua_buckets[0].async_op.reset()
            self.future = self.executor.submit(self._average, bagua_ddp)
            self.status = _AsyncInternalState.SCHEDULED


class AsyncModelAverageAlgorithm(Algorithm):
    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0) -> None:
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps

    def reify(self, process_group: Any) -> AsyncModelAverageAlgorithmImpl:
        return AsyncModelAverageAlgorithmImpl(
            process_group, self.peer_selection_mode, self.sync_interval_ms, self.warmup_steps
        )
