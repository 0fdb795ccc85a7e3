"""N-BEATS and a TCN of darts, which makes its Trainer itself and casts it to the series' float64."""

import noted
import numpy as np
import pytorch_lightning as pl
from darts import TimeSeries
from darts.models import NBEATSModel, TCNModel

PACKAGES = ["darts", "pytorch-lightning"]

noted.seed()
series = TimeSeries.from_values(np.sin(np.arange(120) / 5) + 0.1 * np.random.randn(120))
training, validation = series[:90], series[66:]
options = {
    "input_chunk_length": 16, "output_chunk_length": 4, "n_epochs": 2, "batch_size": 12, "random_state": 1,
    "pl_trainer_kwargs": {
        "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "callbacks": [noted.callback(pl)],
    },
}  # fmt: skip
for model in (
    NBEATSModel(num_stacks=2, num_blocks=1, layer_widths=16, **options),
    TCNModel(num_filters=4, dropout=0.1, **options),
):
    model.fit(training, val_series=validation, verbose=False)
    assert len(model.predict(4)) == 4
