"""DistMult of pykeen, by its module for Lightning, on the Nations that pykeen ships."""

import noted
import pytorch_lightning as pl
from pykeen.contrib.lightning import LCWALitModule, SLCWALitModule

PACKAGES = ["pykeen[lightning]"]

for cls, model in ((LCWALitModule, "distmult"), (SLCWALitModule, "transe")):
    noted.seed()
    module = cls(dataset="nations", model=model, model_kwargs={"embedding_dim": 8, "random_seed": 1}, batch_size=128)
    noted.trainer(pl, max_epochs=2).fit(module)
