"""In a rank of a test's world: forwards as language models have them, which no symbolic tracer follows."""

from dataclasses import dataclass

import staged
import torch
from together import Seen
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchhal

WORDS, WIDTH, LENGTH = 20, 16, 8


class Cache:
    """Keys and values of earlier calls."""


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    cache: Cache | None = None
    hidden: tuple[torch.Tensor, ...] = ()


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Rotary(nn.Module):
    """Angles of the positions; no parameter, and registered after the layers that are given them."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("frequencies", 100 ** (-torch.arange(0, size, 2) / size), persistent=False)

    @torch.no_grad()
    def forward(self, x, positions):
        angles = (positions[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Layer(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask=None, angles=None, *, cache=None, use_cache=False):
        assert cache is None and not use_cache
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if self.rotary:
            q, k = rotate(q, *angles), rotate(k, *angles)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()  # without device=
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, causal if mask is None else causal & mask))
        return x + self.down(F.gelu(self.up(x)))


class Body(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        if not rotary:
            self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(rotary) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        if rotary:
            self.rotary = Rotary(WIDTH)

    def forward(self, tokens=None, mask=None, positions=None, use_cache=None, **options):
        if tokens is None:
            raise ValueError("no tokens")
        x = self.embed(tokens)
        if positions is None:
            positions = torch.arange(x.shape[1])[None]  # without device=
        cache = Cache() if use_cache else None
        if mask is not None and mask.dim() < 4:
            mask = mask[:, None, :].bool().expand(-1, x.shape[1], -1) | torch.eye(x.shape[1], dtype=torch.bool)
        angles = None
        if hasattr(self, "place"):
            x = x + self.place(positions)
        else:
            angles = self.rotary(x, positions.expand(len(x), -1))
        seen = ()
        for layer in self.layers:
            seen += (x.mean(),) if options.get("keep") else ()
            x = layer(x, mask, angles=angles, cache=cache, use_cache=use_cache)
        return {"last": self.norm(x), "cache": cache, "seen": seen}


class Language(torchhal.Module):
    """Rotary angles, as Llama has them."""

    rotary = True
    given: dict = {}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = Body(self.rotary)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens, mask=None, labels=None, **options):
        found = self.body(tokens=tokens, mask=mask, **options)
        logits = self.head(found["last"])
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(logits, loss, found["cache"], found["seen"])

    def training_step(self, batch, batch_idx):
        output = self(batch[0], use_cache=False, **self.given)
        assert type(output) is Output and output.loss is None and output.cache is None
        assert all(value.dim() == 0 for value in output.hidden)
        loss = F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(*batch[:1], labels=batch[1]).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Learned(Language):
    """Learned positions, as GPT-2 has them."""

    rotary = False


class Keeping(Language):
    given = {"keep": True}


class Masked(Language):
    def training_step(self, batch, batch_idx):
        output = self(batch[0], mask=batch[2], positions=batch[3])
        loss = F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_epoch=True)
        return loss


class OwnLoss(Language):
    """The loss is a result of the forward."""

    def training_step(self, batch, batch_idx):
        loss = self(batch[0], labels=batch[1]).loss
        self.log("loss", loss, on_epoch=True)
        return loss


class InPlace(Language):
    """Changes what comes in, reads a tensor of its own and a weight of a layer, stops gradients between layers."""

    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(1.5)

    def forward(self, tokens, **options):
        x = self.body.embed(tokens)
        with torch.no_grad():
            aside = self.body.layers[0](x, None, self.body.rotary(x, torch.arange(LENGTH)[None].expand(len(x), -1)))
            aside = aside * 2
        angles = self.body.rotary(x, torch.arange(LENGTH)[None].expand(len(x), -1))
        total = torch.zeros(())
        for layer in self.body.layers:
            x = layer(x, angles=angles) * self.scale
            if self.training:
                x[:, 0] = x[:, 0] * 0.5 + aside[:, 0]
            total += x.mean()
        return Output(F.linear(self.body.norm(x + total), self.head.weight))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]).logits.flatten(0, 1), batch[1].flatten()))


class Caching(Language):
    def training_step(self, batch, batch_idx):
        return self(batch[0], use_cache=True).logits.mean()


class OnValues(Language):
    def forward(self, tokens, **options):
        if tokens.sum() > 0:
            return super().forward(tokens, **options)
        return super().forward(tokens)


class Backwards(Language):
    """Calls its layers from the last to the first."""

    def forward(self, tokens, **options):
        if len(tokens) < 0:  # which the symbolic tracer can't know
            raise ValueError
        x = self.body.embed(tokens)
        angles = self.body.rotary(x, torch.arange(LENGTH)[None].expand(len(x), -1))
        for layer in reversed(self.body.layers):
            x = layer(x, angles=angles)
        return Output(self.head(self.body.norm(x)))


def sentences():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (32, LENGTH + 1), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (32, 1), generator=generator)
    places = torch.arange(LENGTH).expand(32, -1)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), places < lengths, places.contiguous())


def trained(strategy, model, options=None):
    """(epoch's loss, val_loss, weights on rank 0) after a fit, or (kind of error, message, steps)."""
    seen = Seen()
    run = staged.trainer(strategy, callbacks=seen, max_epochs=1, **(options or {}))
    data = DataLoader(sentences(), 8)
    try:
        run.fit(globals()[model](), data, data)
    except Exception as error:
        return type(error).__name__, str(error), run.global_step
    return float(run.callback_metrics["loss"]), float(run.callback_metrics["val_loss"]), seen.state
