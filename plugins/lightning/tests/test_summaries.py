"""torchhal's summary of a model has the numbers of Lightning's, where that has them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from torchhal.trainer.callbacks import summarize


def convolutions():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 10),
    )
    model[0][0].requires_grad_(False)
    return model, torch.zeros(4, 3, 6, 6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Dropout()

    def forward(self, tokens, mask=None):
        values = self.embedding(tokens)
        return self.head(self.attention(values, values, values)[0]) * self.scale


def attention():
    return Attention(), (torch.zeros(2, 5, dtype=torch.long), None)


def recurrent():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, num_layers=2), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    return Net(), {"x": torch.zeros(7, 3, 4)}


@pytest.mark.parametrize("depth", [1, -1])
@pytest.mark.parametrize("make", [convolutions, attention, recurrent])
def test_numbers_of_lightning(pl, make, depth):
    net, example = make()

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, *args, **kwargs):
            return self.net(*args, **kwargs)

    model = Model()
    model.example_input_array = example
    lightnings = pl.utilities.model_summary.ModelSummary(model, depth)
    ours = summarize(model, depth).splitlines()
    rows = [re.split(r"\s{2,}", line) for line in ours[2:-1]]
    assert [row[0] for row in rows] == lightnings.layer_names
    assert [row[1] for row in rows] == lightnings.layer_types
    assert [int(row[2].replace(",", "")) for row in rows] == lightnings.param_nums
    assert [row[-2] for row in rows] == [str(size).replace("'", "") for size in lightnings.in_sizes]
    assert [row[-1] for row in rows] == [str(size).replace("'", "") for size in lightnings.out_sizes]
    trainable = lightnings.trainable_parameters
    frozen = lightnings.total_parameters - trainable
    assert ours[-1].startswith(f"{trainable:,} trainable parameters, {frozen:,} frozen, ")
    assert lightnings.model_size * 1e6 == pytest.approx(sum(p.numel() * 4 for p in net.parameters()))
