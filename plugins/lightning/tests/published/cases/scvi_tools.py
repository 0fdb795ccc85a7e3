"""SCVI of scvi-tools, whose Trainer is a subclass of Lightning's, on counts of four kinds of cells."""

import anndata
import lightning.pytorch as pl
import noted
import numpy as np
import scvi

PACKAGES = ["scvi-tools"]

noted.seed()
scvi.settings.seed = 1
kinds = np.random.randint(0, 4, 160)
rates = np.random.gamma(2.0, 1.0, (4, 30))[kinds]
cells = anndata.AnnData(np.random.poisson(rates).astype(np.float32))
cells.obs["batch"] = np.where(np.arange(160) % 2, "one", "other")
scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4)
model.train(
    max_epochs=4, batch_size=32, accelerator="cpu", devices=1, check_val_every_n_epoch=1, enable_progress_bar=False,
    early_stopping=True, plan_kwargs={"reduce_lr_on_plateau": True}, callbacks=[noted.callback(pl)],
)  # fmt: skip
assert len(model.history["elbo_validation"]) == 4
