"""A TemporalFusionTransformer of pytorch_forecasting, for four series of waves."""

import lightning.pytorch as pl
import noted
import numpy as np
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import QuantileLoss

PACKAGES = ["pytorch-forecasting"]

noted.seed()
times = np.arange(60)
series = [
    pd.DataFrame({"series": str(number), "time": times, "value": 3 + np.sin(times / (2 + number))})
    for number in range(4)
]
data = pd.concat(series, ignore_index=True)
data["day"] = (data.time % 7).astype(str)
data["value"] += 0.1 * np.random.randn(len(data))
training = TimeSeriesDataSet(
    data[data.time < 50],
    time_idx="time",
    target="value",
    group_ids=["series"],
    min_encoder_length=8,
    max_encoder_length=16,
    max_prediction_length=6,
    static_categoricals=["series"],
    time_varying_known_categoricals=["day"],
    time_varying_known_reals=["time"],
    time_varying_unknown_reals=["value"],
    target_normalizer=GroupNormalizer(groups=["series"], transformation="softplus"),
    add_relative_time_idx=True,
    add_target_scales=True,
)
validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
model = TemporalFusionTransformer.from_dataset(
    training, learning_rate=0.03, hidden_size=8, attention_head_size=2, dropout=0.1, hidden_continuous_size=4,
    loss=QuantileLoss(), optimizer="adam", reduce_on_plateau_patience=1, log_interval=-1,
)  # fmt: skip
trainer = noted.trainer(pl, max_epochs=2, gradient_clip_val=0.1, limit_train_batches=8)
trainer.fit(
    model,
    train_dataloaders=training.to_dataloader(train=True, batch_size=16, num_workers=0),
    val_dataloaders=validation.to_dataloader(train=False, batch_size=16, num_workers=0),
)
