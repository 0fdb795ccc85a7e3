"""Collective variables of mlcolvar, a DeepTDA and an autoencoder, from descriptors of two states."""

import lightning.pytorch as pl
import noted
import torch
from mlcolvar.cvs import AutoEncoderCV, DeepTDA
from mlcolvar.data import DictDataset, DictModule
from mlcolvar.utils.trainer import MetricsCallback

PACKAGES = ["mlcolvar"]

noted.seed()
states = (torch.arange(80) % 2).float()
dataset = DictDataset({"data": torch.randn(80, 6) + states[:, None], "labels": states}, feature_names=list("abcdef"))
options = {"optimizer": {"lr": 1e-2, "weight_decay": 1e-5}}
for model in (
    DeepTDA(n_states=2, n_cvs=1, target_centers=[-7, 7], target_sigmas=[0.2, 0.2], layers=[6, 8, 1], options=options),
    AutoEncoderCV([6, 4, 2]),
):
    metrics = MetricsCallback()
    data = DictModule(dataset, lengths=[0.8, 0.2], batch_size=16, generator=torch.Generator().manual_seed(1))
    trainer = noted.trainer(pl, max_epochs=3, callbacks=[metrics])
    trainer.fit(model, data)
    assert len(metrics.metrics["train_loss_epoch"]) == 3
