"""An MLPClassifier of deeptab, which makes its Trainer itself and returns to its best checkpoint."""

import lightning.pytorch as pl
import noted
import numpy as np
import pandas as pd
from deeptab.models import MLPClassifier

PACKAGES = ["deeptab"]

noted.seed()
data = pd.DataFrame(np.random.randn(160, 3), columns=["a", "b", "c"])
target = (data.a + data.b > 0).astype(int).to_numpy()
model = MLPClassifier()
model.fit(
    data, target, max_epochs=3, batch_size=32, random_state=1, accelerator="cpu", devices=1, enable_progress_bar=False,
    callbacks=[noted.callback(pl)],
)  # fmt: skip
assert model.predict(data).shape[0] == 160
