"""A CategoryEmbeddingModel of pytorch_tabular, which makes its Trainer itself."""

import noted
import numpy as np
import pandas as pd
import pytorch_lightning as pl
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

PACKAGES = ["pytorch_tabular", "requests"]

noted.seed()
data = pd.DataFrame(np.random.randn(160, 3), columns=["a", "b", "c"])
data["kind"] = np.random.choice(["one", "other", "third"], 160)
data["target"] = np.where(data.a + data.b * (data.kind == "one") > 0, "yes", "no")
model = TabularModel(
    data_config=DataConfig(target=["target"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"]),
    model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", dropout=0.1, learning_rate=1e-2),
    optimizer_config=OptimizerConfig(lr_scheduler="ReduceLROnPlateau", lr_scheduler_params={"patience": 0}),
    trainer_config=TrainerConfig(
        batch_size=32, max_epochs=3, accelerator="cpu", progress_bar="none", load_best=False, checkpoints=None,
        early_stopping="valid_loss", seed=1,
    ),
    verbose=False,
    suppress_lightning_logger=True,
)  # fmt: skip
model.fit(train=data[:128], validation=data[128:], callbacks=[noted.callback(pl)], seed=1)
assert len(model.predict(data[128:])) == 32
