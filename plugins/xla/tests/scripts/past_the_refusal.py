"""Two replicas on PJRT's CPU, in which torch_xla joins none: what the refusal keeps from starting."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from xla_training import Net, batches, trainer

import torchhal_xla.data_parallel
from torchhal_xla.accelerator import XLAAccelerator

torchhal_xla.data_parallel.check_collectives = lambda processes: None  # here, and in the workers, which import this
XLAAccelerator.device_count = lambda self: 2

if __name__ == "__main__":
    trainer("xla", devices=2).fit(Net(), batches(2))
    print("trained")
