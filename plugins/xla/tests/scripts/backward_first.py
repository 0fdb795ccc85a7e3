"""A backward on the CPU before the first XLA device is there."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from xla_training import Net, batches, trainer

torch.ones(1, requires_grad=True).sum().backward()
trainer().fit(Net(), batches(1))
