"""What the parity tests train: models without a parameter whose true gradient is zero, and the plain loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import torchhal

BATCH = 16  # samples of one batch, all ranks together
BATCHES = 24
ACCUMULATE = 2  # so there are 12 optimizer steps
CLIP = 0.5


class Attention(nn.Module):
    """Self-attention; written with head_dim, so that it works on a rank's share of the heads too."""

    def __init__(self, width, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)  # a bias of all keys changes nothing
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, width // 4)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Base(torchhal.Module):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]).flatten(0, -2), batch[1].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0]).flatten(0, -2)
        self.log("val_loss", F.cross_entropy(logits, batch[1].flatten()))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-6)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), "interval": "step"}]


class Transformer(Base):
    tensor_parallel_plan = {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self, width=32, layers=4, words=20):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.1)
        self.register_buffer("strength", torch.tensor(1.25))  # read by the forward itself, in the first stage
        self.register_buffer("unused", torch.arange(3), persistent=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens) * self.strength + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class DividedNorms(Transformer):
    """Each rank of a layer norms a part of the sequence."""

    tensor_parallel_plan = {
        **Transformer.tensor_parallel_plan,
        "layers.*.norm1": "sequence_parallel",
        "norm": "sequence_parallel",
    }


class ConvNet(Base):
    """Odd sizes, a frozen layer, a parameter of no dimension; group norms, as batch norms see a rank's share."""

    tensor_parallel_plan = {"body.7": "colwise", "body.9": "rowwise"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.Conv2d(6, 9, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(81, 17),
            nn.Linear(17, 24),
            nn.ReLU(),
            nn.Linear(24, 5),
        )
        self.body[6].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images):
        return self.body(images) * self.scale


class BatchNormNet(Base):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 16, 5),
        )

    def forward(self, images):
        return self.body(images)


class Recurrent(Base):
    """An LSTM, which keeps a list of its own parameters."""

    tensor_parallel_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 12)
        self.recurrent = nn.LSTM(12, 10, num_layers=2, batch_first=True)
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 10)
        self.head = nn.Linear(10, 20)

    def forward(self, tokens):
        return self.head(self.down(F.gelu(self.up(self.recurrent(self.embed(tokens))[0]))))


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.gate = nn.Parameter(torch.ones(1, width))

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) * self.gate


class Odd(Base):
    """Parameters of no dimension, one element, one row, none at all; frozen, tied, unused ones; buffers of any kind."""

    tensor_parallel_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Gated(8) for _ in range(3))
        self.layers[1].down.weight = self.layers[0].down.weight
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("phase", torch.polar(torch.ones(8), torch.linspace(0, 1, 8)))
        self.register_buffer("order", torch.arange(8), persistent=False)
        self.register_buffer("keep", torch.tensor([True, False] * 4))

    def forward(self, tokens):
        x = self.frozen(self.embed(tokens)) * self.scale + self.empty.sum()
        for layer in self.layers:
            x = x + layer(x)
        turned = (x.to(torch.complex64) * self.phase).real[..., self.order]
        return self.head(torch.where(self.keep, turned, x) * self.one)


class Single(nn.Linear):
    """So small that one unit holds it."""

    def __init__(self):
        super().__init__(4, 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ComplexWeights(Transformer):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(32), torch.linspace(0, 1, 32)))

    def forward(self, tokens):
        x = ((self.embed(tokens) * self.strength + self.position) * self.turn).real
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def data(model, batches=BATCHES):
    """The samples in order: (tokens, next tokens) or (images, labels)."""
    generator = torch.Generator().manual_seed(1)
    count = batches * BATCH
    if model not in (ConvNet, BatchNormNet):
        tokens = torch.randint(0, 20, (count, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 5, (count,), generator=generator)


def plain(model, dtype=None, true=False):
    """The single-process loop in plain PyTorch: (losses of the batches, final state).

    In ``dtype``: that of autocast, or with ``true`` that of the parameters.
    """
    module = model().to(dtype) if true else model()
    [optimizer], [config] = module.configure_optimizers()
    scheduler = config["scheduler"]
    inputs, targets = data(model)
    losses = []
    for index in range(BATCHES):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None and not true):
            loss = F.cross_entropy(module(inputs[rows]).flatten(0, -2), targets[rows].flatten())
        losses.append(loss.item())
        (loss / ACCUMULATE).backward()
        if index % ACCUMULATE == ACCUMULATE - 1:
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, module.state_dict()


class RandomSamples(Dataset):
    """Samples that every read changes, as augmentations do."""

    def __len__(self):
        return 4 * BATCH

    def __getitem__(self, index):
        tokens = torch.randint(0, 20, (9,))
        return tokens[:-1], tokens[1:]


class Loader:
    """A ``train_dataloader`` that pickles: each rank's share of the transformer's batches."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __call__(self):
        from training import loader

        return loader(self.trainer, Transformer)
