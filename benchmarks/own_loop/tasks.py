"""Data, models and records that the three loops of each task share; what a run measures comes from its environment."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 16 // WORLD  # of a process: the batch of all together is the same
BATCHES = int(os.environ.get("OWN_LOOP_BATCHES", "12"))
EPOCHS = int(os.environ.get("OWN_LOOP_EPOCHS", "2"))
FOLDER = Path(os.environ.get("OWN_LOOP_FOLDER", "/nowhere"))
"""Where the checkpoint of the task 'resume' lies."""
RESUMES = os.environ.get("OWN_LOOP_RESUMES") == "1"
SAVE_AT = (1, 4)
"""Epoch and batch after which that task saves."""
SAMPLES = BATCHES * BATCH * WORLD
if importlib.util.find_spec("habana_frameworks_stub") is not None:
    sys.modules["habana_frameworks"] = None  # Accelerate imports it, and this repository's is a simulation
torch.set_num_threads(1)
losses: list[torch.Tensor] = []
results: dict[str, float] = {}


def _generator(seed):
    return torch.Generator().manual_seed(seed)


# -- what the loops train ----------------------------------------------------------------------------------------------


def bert():
    """A classifier of transformers, tiny and with random weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def sentences(samples=SAMPLES, seed=0):
    """Dicts as a tokenizer makes them; the label is the most frequent third of the words."""
    tokens = torch.randint(3, 100, (samples, 24), generator=_generator(seed))
    labels = torch.stack([(tokens % 3 == rest).sum(1) for rest in range(3)], 1).argmax(1)
    mask = torch.ones_like(tokens)
    return [
        {"input_ids": each, "attention_mask": ones, "labels": label}
        for each, ones, label in zip(tokens, mask, labels, strict=True)
    ]


def conv_net():
    """A classifier of images of 3 x 16 x 16, without batch norm, which computes otherwise over two ranks."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def images(samples=SAMPLES, seed=0):
    """Pairs of an image and its class, which shifts the image's mean."""
    labels = torch.randint(0, 10, (samples,), generator=_generator(seed))
    return TensorDataset(
        torch.randn(samples, 3, 16, 16, generator=_generator(seed + 1)) + labels[:, None, None, None] / 10, labels
    )


def generator_net():
    """From 8 numbers of noise to a point of 16 coordinates."""
    return nn.Sequential(nn.Linear(8, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 16))


def discriminator_net():
    """From such a point to the logit of being real."""
    return nn.Sequential(
        nn.Linear(16, 384), nn.LeakyReLU(0.2), nn.Linear(384, 384), nn.LeakyReLU(0.2), nn.Linear(384, 1)
    )


def points(samples=SAMPLES):
    """Pairs of a real point and the noise for a fake one."""
    return TensorDataset(
        torch.randn(samples, 16, generator=_generator(0)) * 0.5 + 1, torch.randn(samples, 8, generator=_generator(1))
    )


def mlp(dropout=0.0):
    """A classifier of 32 numbers."""
    return nn.Sequential(
        nn.Linear(32, 768), nn.ReLU(), nn.Dropout(dropout), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 4)
    )


def vectors(samples=SAMPLES):
    """Pairs of 32 numbers and their class."""
    inputs = torch.randn(samples, 32, generator=_generator(0))
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


# -- what a run records ------------------------------------------------------------------------------------------------


def record(loss):
    """Keep the loss of a step."""
    losses.append(loss.detach())


def finish(**found):
    """Write what this process has recorded; ``found`` are numbers of the whole run."""
    results.update({name: float(value) for name, value in found.items()})
    if "OWN_LOOP_OUT" in os.environ:
        record = {"losses": [float(loss) for loss in losses], "results": results}
        Path(os.environ["OWN_LOOP_OUT"] + f".{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record))
