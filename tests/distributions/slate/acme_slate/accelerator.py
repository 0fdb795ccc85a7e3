import torch

from torchhal.accelerators import Accelerator
from torchhal.plugin import Availability


class SlateAccelerator(Accelerator):
    name = "slate"
    device_type = "cpu"
    indexed = False
    oversubscribable = True

    def __init__(self, clock: int = 1) -> None:
        self.clock = clock

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True)

    def device_count(self) -> int:
        return 1

    def compute(self) -> float:
        return float(torch.ones(2).sum()) * self.clock
