"""CoLES of pytorch-lifestream: embeddings of clients' events, with two data modules' loaders of its own."""

from functools import partial

import noted
import numpy as np
import pytorch_lightning as pl
import torch
from ptls.data_load.datasets import MemoryMapDataset
from ptls.frames import PtlsDataModule
from ptls.frames.coles import ColesDataset, CoLESModule
from ptls.frames.coles.split_strategy import SampleSlices
from ptls.nn import RnnSeqEncoder, TrxEncoder

PACKAGES = ["pytorch-lifestream"]

noted.seed()


def clients(number):
    for client in range(number):
        length = np.random.randint(30, 40)
        yield {
            "client": client,
            "event_time": torch.arange(length),
            "kind": torch.from_numpy(np.random.randint(1, 4, length) + client % 4),
            "amount": torch.randn(length),
        }


def dataset(number):
    return ColesDataset(MemoryMapDataset(list(clients(number))), SampleSlices(split_count=3, cnt_min=5, cnt_max=20))


events = TrxEncoder(
    embeddings={"kind": {"in": 9, "out": 4}}, numeric_values={"amount": "identity"}, use_batch_norm_with_lens=True
)
model = CoLESModule(
    seq_encoder=RnnSeqEncoder(trx_encoder=events, hidden_size=8, type="gru"),
    optimizer_partial=partial(torch.optim.Adam, lr=1e-2),
    lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9),
)
data = PtlsDataModule(
    train_data=dataset(32), train_num_workers=0, train_batch_size=8, valid_data=dataset(16), valid_num_workers=0,
    valid_batch_size=8,
)  # fmt: skip
trainer = noted.trainer(pl, max_epochs=2)
trainer.fit(model, data)
