"""Started by torchrun: must not train."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from xla_training import Net, batches, trainer

trainer("xla").fit(Net(), batches(4))
print("trained")
