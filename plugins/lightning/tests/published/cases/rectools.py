"""SASRec of rectools, a sequential recommender, which makes its Trainer by a function that is given to it."""

import noted
import numpy as np
import pandas as pd
import pytorch_lightning as pl
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

PACKAGES = ["rectools[torch]"]

noted.seed()
interactions = pd.DataFrame({
    Columns.User: np.repeat(np.arange(40), 10),
    Columns.Item: (np.repeat(np.arange(40), 10) + np.tile(np.arange(10), 40) * 3) % 20,
    Columns.Weight: 1.0,
    Columns.Datetime: pd.Timestamp("2024-01-01") + pd.to_timedelta(np.tile(np.arange(10), 40), unit="D"),
})  # fmt: skip
dataset = Dataset.construct(interactions)


def last_of_each(interactions, **options):
    """Validate by each fifth user's last interaction."""
    last = interactions.groupby(Columns.User)[Columns.Datetime].transform("max") == interactions[Columns.Datetime]
    return (last & (interactions[Columns.User] % 5 == 0)).to_numpy()


model = SASRecModel(
    n_factors=8, n_blocks=1, n_heads=1, session_max_len=9, batch_size=8, lr=1e-2, loss="softmax",
    get_val_mask_func=last_of_each, get_trainer_func=lambda: noted.trainer(pl, max_epochs=2),
)  # fmt: skip
model.fit(dataset)
assert len(model.recommend(users=[1], dataset=dataset, k=3, filter_viewed=False)) == 3
