"""SchNet of schnetpack: energies and forces of rattled water, in its AtomisticTask and from a database it writes."""

import typing

import noted
import numpy as np
import pytorch_lightning as pl
import torch
import torch.utils.data.dataloader
import torchmetrics
from ase import Atoms

torch.utils.data.dataloader.T_co = typing.TypeVar("T_co", covariant=True)  # which an older torch had there

import schnetpack as spk  # noqa: E402
import schnetpack.transform as trn  # noqa: E402
from schnetpack.data import ASEAtomsData, AtomsDataModule  # noqa: E402

PACKAGES = ["schnetpack"]

noted.seed()
water = np.array([[0.0, 0.0, 0.1], [0.0, 0.8, -0.5], [0.0, -0.8, -0.5]])
moved = [0.05 * np.random.randn(3, 3) for _ in range(32)]
database = ASEAtomsData.create("water.db", distance_unit="Ang", property_unit_dict={"energy": "eV", "forces": "eV/Ang"})
database.add_systems(
    property_list=[{"energy": np.array([(each**2).sum()]), "forces": -2 * each} for each in moved],
    atoms_list=[Atoms("OHH", positions=water + each) for each in moved],
)
data = AtomsDataModule(
    "water.db", batch_size=4, num_train=20, num_val=12, num_workers=0, split_file=None,
    transforms=[trn.ASENeighborList(cutoff=4.0), trn.RemoveOffsets("energy", remove_mean=True), trn.CastTo32()],
)  # fmt: skip
model = spk.model.NeuralNetworkPotential(
    representation=spk.representation.SchNet(
        n_atom_basis=8,
        n_interactions=1,
        radial_basis=spk.nn.GaussianRBF(n_rbf=8, cutoff=4.0),
        cutoff_fn=spk.nn.CosineCutoff(4.0),
    ),
    input_modules=[spk.atomistic.PairwiseDistances()],
    output_modules=[spk.atomistic.Atomwise(n_in=8, output_key="energy"), spk.atomistic.Forces()],
    postprocessors=[trn.CastTo64(), trn.AddOffsets("energy", add_mean=True)],
)
outputs = [
    spk.task.ModelOutput(name, torch.nn.MSELoss(), weight, metrics={"MAE": torchmetrics.MeanAbsoluteError()})
    for name, weight in (("energy", 0.1), ("forces", 0.9))
]
task = spk.task.AtomisticTask(
    model, outputs, optimizer_cls=torch.optim.AdamW, optimizer_args={"lr": 1e-2}, warmup_steps=4,
    scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau, scheduler_args={"patience": 0},
    scheduler_monitor="val_loss",
)  # fmt: skip
trainer = noted.trainer(pl, max_epochs=3, inference_mode=False)
trainer.fit(task, datamodule=data)
