"""matgl's MEGNet, in its ModelLightningModule, for a property of crystals of salt with strained lattices."""

import lightning.pytorch as pl
import noted
import numpy as np
from matgl.ext.pymatgen import Structure2Graph
from matgl.graph.data import MGLDataLoader, MGLDataset
from matgl.models import MEGNet
from matgl.utils.training import ModelLightningModule
from pymatgen.core import Lattice, Structure
from torch.utils.data import random_split

PACKAGES = ["matgl"]

noted.seed()
lengths = np.random.uniform(4.0, 6.0, 24)
crystals = [
    Structure.from_spacegroup("Pm-3m", Lattice.cubic(length), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    for length in lengths
]
dataset = MGLDataset(
    structures=crystals,
    labels={"length": lengths.astype(np.float32).tolist()},
    converter=Structure2Graph(element_types=("Na", "Cl"), cutoff=4.5),
    save_cache=False,
)
training, validation = random_split(dataset, [16, 8])
training_loader, validation_loader = MGLDataLoader(training, validation, batch_size=4, num_workers=0)
model = MEGNet(
    dim_node_embedding=4, dim_edge_embedding=8, nblocks=1, hidden_layer_sizes_input=(8, 4),
    hidden_layer_sizes_conv=(8, 4), hidden_layer_sizes_output=(4,), element_types=("Na", "Cl"), cutoff=4.5,
)  # fmt: skip
trainer = noted.trainer(pl, max_epochs=3, inference_mode=False)
trainer.fit(ModelLightningModule(model, lr=1e-2), training_loader, validation_loader)
