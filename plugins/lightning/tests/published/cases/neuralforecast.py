"""NHITS of neuralforecast, which makes its Trainer itself, with a validation each fourth step."""

import noted
import numpy as np
import pandas as pd
import pytorch_lightning as pl
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

PACKAGES = ["neuralforecast"]

noted.seed()
days = pd.date_range("2024-01-01", periods=80, freq="D")
data = pd.concat(
    pd.DataFrame({"unique_id": str(number), "ds": days, "y": np.sin(np.arange(80) / (2 + number)) + number})
    for number in range(4)
)
model = NHITS(
    h=6, input_size=12, max_steps=12, val_check_steps=4, batch_size=2, windows_batch_size=16,
    early_stop_patience_steps=5,
    mlp_units=3 * [[16, 16]], random_seed=1, scaler_type="standard", accelerator="cpu", devices=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[noted.callback(pl)],
)  # fmt: skip
forecast = NeuralForecast(models=[model], freq="D")
forecast.fit(data, val_size=12)
assert len(forecast.predict()) == 24
