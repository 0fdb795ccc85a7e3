"""In a rank of a test's world, or alone: losses that are means over the samples of a batch, and others that are not."""

import staged
import together
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import torchhal

CLASSES, TOKENS, SAMPLES, BATCH = 5, 6, 32, 8


class Tagger(torchhal.Module):
    """A class for each token of a sample, of which some are padding."""

    tensor_parallel_plan = {"layers.0": "colwise", "layers.1": "rowwise"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, CLASSES))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return self.loss_of(self(batch[0]), *batch[1:])

    def loss_of(self, output, target, *rest):
        return self.of_tokens(output, target, "none").sum(1).mean()

    def of_tokens(self, output, target, reduction):
        found = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction=reduction)
        return found.unflatten(0, target.shape) if reduction == "none" else found

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Summed(Tagger):
    def loss_of(self, output, target):
        return self.of_tokens(output, target, "sum") / 100


class OverTokens(Tagger):
    def loss_of(self, output, target):
        return self.of_tokens(output, target, "mean")


class Ratio(Tagger):
    def loss_of(self, output, target):
        return self.of_tokens(output, target, "sum") / output.square().sum()


class Contrasting(Tagger):
    def loss_of(self, output, target):
        each = F.normalize(output.flatten(1), dim=1)
        return F.cross_entropy(each @ each.T * 5, torch.arange(len(each)))


class MadeInForward(Tagger):
    """As models of transformers make it."""

    def forward(self, x, target):
        output = self.layers(x)
        return {"logits": output, "loss": self.of_tokens(output, target, "mean")}

    def training_step(self, batch, batch_idx):
        return self(*batch)["loss"]


class OverTokensOfLayers(OverTokens):
    """Calls layers, and not itself."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss_of(self.layers[1](self.layers[0](batch[0])), batch[1])}


class OverTokensOfState(OverTokens):
    """Calls a layer whose state has other samples' dimensions than its output."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def training_step(self, batch, batch_idx):
        return self.loss_of(self.layers(self.rnn(batch[0])[0]), batch[1])


class SumAsMean(Tagger):
    """The sum over the samples of all ranks."""

    def loss_of(self, output, target):
        return self.of_tokens(output, target, "none").sum(1).mean() * BATCH / 100


class TokensOfTheBatch(Tagger):
    """The mean over the tokens of a batch, whose mean number per sample the batch holds."""

    def loss_of(self, output, target, tokens):
        return self.of_tokens(output, target, "sum") / (len(target) * tokens)


class WritesToItsBatch(Tagger):
    def training_step(self, batch, batch_idx):
        return self.loss_of(self(batch[0].mul_(0.5)), batch[1])


class WritesToOutputs(Tagger):
    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        output *= 0.5
        return self.loss_of(output, batch[1])


class Recurrent(Tagger):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def training_step(self, batch, batch_idx):
        output, _ = self.rnn(batch[0])
        return self.loss_of(self.layers(output), batch[1])


class RecurrentState(Recurrent):
    def training_step(self, batch, batch_idx):
        output, (state, _) = self.rnn(batch[0])
        return self.loss_of(self.layers(output), batch[1]) + state.square().mean()


class Noisy(Tagger):
    def training_step(self, batch, batch_idx):
        return self.loss_of(self(batch[0] + 0.01 * torch.randn_like(batch[0])), batch[1])


class SumOfReplicas(Tagger):
    """The recipe for a sum, where no rank divides its batch."""

    def loss_of(self, output, target):
        shares = self.trainer.strategy.distributed_sampler_kwargs or {"num_replicas": 1}
        return self.of_tokens(output, target, "sum") / 100 * shares["num_replicas"]


class TokensOfReplicas(Tagger):
    """The recipe for a mean over tokens, where no rank divides its batch."""

    def loss_of(self, output, target):
        tokens = self.trainer.strategy.reduce((target != -100).sum().float(), "mean")
        return self.of_tokens(output, target, "sum") / tokens


def padded():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, TOKENS, 4, generator=generator)
    target = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=generator)
    return TensorDataset(x, target.masked_fill(torch.arange(TOKENS) >= lengths, -100))


def with_tokens(items):
    x, target = default_collate(items)
    return x, target, (target != -100).sum() / len(target)


def fitted(strategy, model, devices=2, replicas=1):
    """(kind of error, message, steps) or (weights, "", steps) of a fit with so many samples per step as one process."""
    seen = together.Seen()
    module = globals()[model]()
    run = staged.trainer(strategy, max_epochs=1, callbacks=seen, devices=devices)
    collate = with_tokens if model == "TokensOfTheBatch" else None
    try:
        run.fit(module, DataLoader(padded(), BATCH // replicas, collate_fn=collate))
    except Exception as error:
        return type(error).__name__, str(error), run.global_step
    return seen.state, "", run.global_step


def in_a_plain_loop(model):
    """Weights of a loop in one process, with the loss of ``model`` for whole batches."""
    module = globals()[model]()
    optimizer = module.configure_optimizers()
    for batch in DataLoader(padded(), BATCH, collate_fn=with_tokens if model == "TokensOfTheBatch" else None):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return module.state_dict()
