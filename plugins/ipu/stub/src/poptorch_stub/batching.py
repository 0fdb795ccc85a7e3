"""How a combined batch is dealt out, and what of the results comes back."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Sizes:
    """Micro-batches in one call: iterations of the device, times accumulated gradients, times replicas' groups."""

    def __init__(self, *, iterations: int, accumulation: int, replicas: int, group: int) -> None:
        self.iterations = iterations
        self.accumulation = accumulation
        self.replicas = replicas
        self.group = group

    @property
    def parts(self) -> int:
        return self.iterations * self.accumulation * (self.replicas // self.group)

    def micro(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the first micro-batch.

        Raises:
            AssertionError: the first dimension can't be dealt out.
        """
        size = tensor.shape[0] if tensor.dim() else 1
        assert size % self.parts == 0, (
            f"an input's first dimension must be a multiple of {self.parts}: {self.iterations} iteration(s) of "
            f"{self.accumulation} accumulated gradient(s) on {self.replicas} replica(s) in groups of {self.group} (got "
            f"shape {tuple(tensor.shape)})"
        )
        return tensor.narrow(0, 0, size // self.parts) if tensor.dim() else tensor

    def steps(self, tensors: list[torch.Tensor]) -> Iterator[list[list[list[torch.Tensor]]]]:
        """For each iteration, for each accumulation, for each replica: its micro-batch."""
        parts = [tensor.chunk(self.parts) if tensor.dim() else (tensor,) * self.parts for tensor in tensors]
        groups = self.replicas // self.group
        for iteration in range(self.iterations):
            yield [
                [
                    [part[(iteration * self.accumulation + index) * groups + replica // self.group] for part in parts]
                    for replica in range(self.replicas)
                ]
                for index in range(self.accumulation)
            ]


def returned(results: list[list[torch.Tensor]], mode: str, period: int, replicas: int) -> torch.Tensor:
    """One output of a call.

    Args:
        results: for each micro-batch of a replica in time, the tensor of each replica.
        mode: name of the OutputMode.
        period: of EveryN.
        replicas: how many there are; a number comes back without a dimension if there is one.
    """
    if mode == "All":
        chosen = results
    elif mode == "EveryN":
        chosen = results[period - 1 :: period]
    elif mode == "Sum":
        columns = zip(*results, strict=True)
        chosen = [[torch.stack(column).sum(0).to(column[0].dtype) for column in columns]]
    else:
        chosen = results[-1:]
    flat = [tensor for row in chosen for tensor in row]
    if flat[0].dim() == 0:
        stacked = torch.stack(flat)
        return stacked[0] if mode in ("Final", "Sum") and replicas == 1 else stacked
    return torch.cat(flat)
