"""List what this distribution provides, without importing torch."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_accelerators() -> list[Component]:
    return [
        Component(
            "gpu", "torchhal_gpu.cuda:GPUAccelerator", "NVIDIA and AMD GPUs, through torch.cuda", aliases=("cuda",)
        ),
        Component("xpu", "torchhal_gpu.xpu:XPUAccelerator", "Intel GPUs, through torch.xpu"),
        Component("mps", "torchhal_gpu.mps:MPSAccelerator", "the GPU of a Mac, through torch.mps"),
    ]


@hookimpl
def torchhal_precisions() -> list[Component]:
    return [Component("tf32", "torchhal_gpu.tf32:TF32Precision", "float32 numbers, TensorFloat-32 arithmetic")]
