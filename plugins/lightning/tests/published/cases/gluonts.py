"""DeepAR of gluonts, which makes its Trainer itself, with a ModelCheckpoint that it restores the best weights from."""

import lightning.pytorch as pl
import noted
import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator

PACKAGES = ["gluonts[torch]"]

noted.seed()
hours = pd.date_range("2024-01-01", periods=200, freq="h")
series = {str(number): pd.Series(np.sin(np.arange(200) / (3 + number)) + 2, index=hours) for number in range(4)}
data = PandasDataset({name: each.to_frame("target") for name, each in series.items()}, target="target")
estimator = DeepAREstimator(
    prediction_length=6, freq="h", context_length=12, hidden_size=8, num_layers=1, batch_size=8,
    num_batches_per_epoch=8,
    trainer_kwargs={
        "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "callbacks": [noted.callback(pl)],
    },
)  # fmt: skip
predictor = estimator.train(data, validation_data=data)
assert len(next(iter(predictor.predict(data))).mean) == 6
