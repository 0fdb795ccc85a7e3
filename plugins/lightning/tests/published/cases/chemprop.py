"""A message passing network of chemprop, for numbers of atoms in small molecules."""

import lightning.pytorch as pl
import noted
import numpy as np
from chemprop import data, models, nn

PACKAGES = ["chemprop"]

noted.seed()
molecules = [f"{'C' * length}{end}" for length in range(1, 9) for end in ("", "O", "N", "Cl", "C(=O)O", "c1ccccc1")]
points = [data.MoleculeDatapoint.from_smi(each, np.array([float(len(each))])) for each in molecules]
training, validation = data.MoleculeDataset(points[:36]), data.MoleculeDataset(points[36:])
scaler = training.normalize_targets()
validation.normalize_targets(scaler)
model = models.MPNN(
    nn.BondMessagePassing(d_h=16),
    nn.MeanAggregation(),
    nn.RegressionFFN(input_dim=16, hidden_dim=16, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)),
    batch_norm=True,
    metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
    warmup_epochs=1,
)
trainer = noted.trainer(pl, max_epochs=3)
trainer.fit(
    model,
    data.build_dataloader(training, batch_size=12, num_workers=0, seed=1),
    data.build_dataloader(validation, batch_size=12, num_workers=0, shuffle=False),
)
