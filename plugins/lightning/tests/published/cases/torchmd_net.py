"""TorchMD-Net's LNNP, which steps its optimizer itself for a warm-up and differentiates in validation."""

import lightning.pytorch as pl
import noted
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torchmdnet.module import LNNP

PACKAGES = ["torchmd-net"]

noted.seed()
water = torch.tensor([[0.0, 0.0, 0.1], [0.0, 0.8, -0.5], [0.0, -0.8, -0.5]])


def dataset(number):
    moved = 0.05 * torch.randn(number, 3, 3)
    return [
        Data(z=torch.tensor([8, 1, 1]), pos=water + each, y=(each**2).sum().view(1, 1), neg_dy=-2 * each)
        for each in moved
    ]


options = {
    "load_model": None, "precision": 32, "embedding_dimension": 8, "num_layers": 1, "num_rbf": 8, "rbf_type": "expnorm",
    "trainable_rbf": False, "activation": "silu", "cutoff_lower": 0.0, "cutoff_upper": 4.0, "max_z": 10,
    "max_num_neighbors": 4, "check_errors": True, "model": "tensornet", "equivariance_invariance_group": "O(3)",
    "derivative": True, "atom_filter": -1, "prior_model": None, "output_model": "Scalar", "reduce_op": "add",
    "output_mlp_num_layers": 0, "remove_ref_energy": False, "train_loss": "mse_loss", "lr": 1e-3, "weight_decay": 0.0,
    "lr_factor": 0.5, "lr_patience": 0, "lr_min": 1e-6, "lr_warmup_steps": 4, "y_weight": 0.5, "neg_dy_weight": 0.5,
    "ema_alpha_y": 0.9, "ema_alpha_neg_dy": 1.0, "test_interval": 10,
}  # fmt: skip
training, validation = dataset(32), dataset(16)
trainer = noted.trainer(pl, max_epochs=3, inference_mode=False)
trainer.fit(LNNP(options), DataLoader(training, 8, shuffle=True), DataLoader(validation, 8))
