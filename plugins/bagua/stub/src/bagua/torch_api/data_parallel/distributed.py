"""The wrapper with the interface of torch's DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.communication import _default_group
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel


class DistributedDataParallel_V1_9_0(nn.Module):
    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[Any] = [],
        algorithm: Any = GradientAllReduceAlgorithm(),  # noqa: B008
    ) -> None:
        super().__init__()
        assert any(parameter.requires_grad for parameter in module.parameters()), (
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
        assert broadcast_buffers is True, "Not yet supported"
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        if not hasattr(module, "_bagua_module_name"):
            module._bagua_module_name = f"{type(self).__name__}_{id(module)}"  # type: ignore[assignment]
        self.inner = BaguaDistributedDataParallel(
            module,
            list(optimizers),
            algorithm,
            process_group=process_group or _default_group(),
            bagua_module_name=str(module._bagua_module_name),
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )

    @property
    def require_backward_grad_sync(self) -> bool:
        return self.inner.require_backward_grad_sync

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.inner.require_backward_grad_sync
        self.inner.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.inner.require_backward_grad_sync = before

    @property
    def bagua_algorithm(self) -> Any:
        return self.inner.bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[Any]:
        return self.inner.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[Any]:
        return self.inner.bagua_buckets


def DistributedDataParallel(
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    broadcast_buffers: bool = True,
    process_group: Any = None,
    bucket_cap_mb: int = 25,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = True,
    optimizers: Sequence[Any] = [],
    algorithm: Any = GradientAllReduceAlgorithm(),  # noqa: B008
) -> Any:
    """Bagua's wrapper or, with an argument that it doesn't know, torch's."""
    if device_ids is output_device is None and dim == 0 and broadcast_buffers is True and check_reduction is False:
        return DistributedDataParallel_V1_9_0(
            module,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            optimizers=optimizers,
            algorithm=algorithm,
        )
    warnings.warn("an argument isn't supported by Bagua, which falls back to torch's DistributedDataParallel")
    return TorchDistributedDataParallel(
        module,
        device_ids,
        output_device,
        dim,
        broadcast_buffers,
        process_group=process_group,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
        check_reduction=check_reduction,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
