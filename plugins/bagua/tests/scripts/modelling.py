"""The model and the data that the scripts train, and plain loops to compare with."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
BATCH = 8  # of all ranks together
STEPS = 6  # in an epoch
LR = 0.1


class Net(nn.Linear):
    """With parameters of its own at the top, beside those of its parts."""

    def __init__(self):
        super().__init__(5, 5)
        self.body = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(super().forward(self.body(x)))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)


def dataset():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH * STEPS, 7, generator=generator)
    return TensorDataset(x, torch.randn(BATCH * STEPS, 3, generator=generator))


def loader(ranks=2):
    return DataLoader(dataset(), batch_size=BATCH // ranks)


def shares(ranks, epochs):
    """The batches of the run: for each step, one for each rank, as a distributed sampler deals them out."""
    x, y = dataset().tensors
    for _ in range(epochs):
        for step in range(STEPS):
            part = slice(step * BATCH, (step + 1) * BATCH)
            yield [(x[part][rank::ranks], y[part][rank::ranks]) for rank in range(ranks)]


def made(cls=Net):
    torch.manual_seed(0)
    return cls()


def difference(state, other):
    return max((state[name].detach() - other[name].detach()).abs().max().item() for name in state)


def plain(mix, ranks, *, epochs=2, cls=Net, after=False, resumed_at=None):
    """Replicas that each step with their own gradients; ``mix(step, flats)`` gives each its weights before its step.

    ``flats``: the replicas' weights, one row each. ``after``: it gives them after the step. ``resumed_at``:
    a step before which all take the mean of their weights and momenta. The mean of the replicas.
    """
    models = [made(cls) for _ in range(ranks)]
    optimizers = [model.configure_optimizers() for model in models]
    for step, batches in enumerate(shares(ranks, epochs)):
        if step == resumed_at:
            _mix(to_all, step, models)
            for group in zip(*(model.parameters() for model in models), strict=True):
                states = [optimizer.state[parameter] for optimizer, parameter in zip(optimizers, group, strict=True)]
                mean = torch.stack([state["momentum_buffer"] for state in states]).mean(0)
                for state in states:
                    state["momentum_buffer"] = mean.clone()
        for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
        if not after:
            _mix(mix, step, models)
        for optimizer in optimizers:
            optimizer.step()
        if after:
            _mix(mix, step, models)
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


@torch.no_grad()
def _mix(mix, step, models):
    flats = torch.stack([nn.utils.parameters_to_vector(model.parameters()) for model in models])
    for model, flat in zip(models, mix(step, flats), strict=True):
        nn.utils.vector_to_parameters(flat.clone(), model.parameters())


def to_all(step, flats):
    return flats.mean(0).expand_as(flats)


def shift_one(step, flats):
    """Rank r of the first half meets another of the second half in each step."""
    half = len(flats) // 2
    mixed = flats.clone()
    for low in range(half):
        high = half + (low + step) % half
        mixed[low] = mixed[high] = (flats[low] + flats[high]) / 2
    return mixed


def every(interval, mix):
    return lambda step, flats: mix(step // interval, flats) if step % interval == 0 else flats


def plain_qadam(*, lr, warmup, epochs=2, betas=(0.9, 0.999), eps=1e-8, every=4):
    """Q-Adam on the mean gradients of two ranks, sent exactly; the weights, and how far quantization may lead away.

    The second moment, and one gradient, stay behind at the end of the warm-up. What is sent is two quantizations off,
    each by a step of a 255th of its range; the first moment keeps nine tenths of that.
    """
    model = made()
    first = second = 0.0
    wrong = off = 0.0
    for step, batches in enumerate(shares(2, epochs), start=1):
        model.zero_grad()
        for batch in batches:
            (model.training_step(batch, 0) / len(batches)).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        if step != warmup:
            first = betas[0] * first + (1 - betas[0]) * gradient
        if step < warmup:
            second = betas[1] * second + (1 - betas[1]) * gradient**2
        if step > warmup:
            wrong = betas[0] * wrong + 2 * (first.max() - first.min()).item() / 255
        rate = lr * 0.5 ** ((step - 1) // every) / (1 - betas[0] ** step)
        spread = second.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps
        off = off + rate * wrong / spread
        with torch.no_grad():
            weights = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(weights - rate * first / spread, model.parameters())
    return model.state_dict(), off
