"""Loops of a user's own, by torchhal.Run on any strategy and by plain PyTorch, which give the same numbers."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchhal

SAMPLES, BATCH, EPOCHS = 40, 8, 2


class Net(nn.Module):
    """Two blocks, which strategies may shard or cut, with a plan for tensor parallelism."""

    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, outputs=1):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, outputs)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 8, generator=generator), torch.randn(samples, 1, generator=generator))


def net(outputs=1, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(outputs)


class Plain:
    """What a loop calls of a Run, as one process of plain PyTorch does it."""

    current_epoch = 0

    def __init__(self, accumulate=1):
        self._accumulate, self._index = accumulate, 0

    def setup(self, *objects, **named):
        return (*objects, *named.values())

    def batches(self, loader):
        for index, batch in enumerate(loader):
            self._last = (index + 1) % self._accumulate == 0 or index + 1 == len(loader)
            self._first = index % self._accumulate == 0
            yield batch

    evaluation_batches = staticmethod(iter)

    def backward(self, loss):
        (loss / self._accumulate).backward()

    def forward_backward(self, function, batch):
        loss = function(batch)
        self.backward(loss)
        return loss.detach()

    def step(self, optimizer, clip=None):
        if self._last:
            if clip is not None:
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
            optimizer.step()

    def clear(self, optimizer):
        if self._first:
            optimizer.zero_grad()

    def gather(self, value):
        return value.reshape(1) if not value.dim() else value

    def reduce(self, value):
        return value

    def end(self):
        pass


class ByRun(torchhal.Run):
    def step(self, optimizer, clip=None):
        if clip is not None:
            self.clip_gradients(optimizer, clip)
        optimizer.step()

    def clear(self, optimizer):
        optimizer.zero_grad()


def regression(run, batch, whole=False, reduces=True):
    """One model, a keyword, clipping and accumulation; validated after each epoch on 11 samples."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=batch)
    model, optimizer, loader = run.setup(model, optimizer, loader)
    losses = []

    def loss_of(batch):
        return nn.functional.mse_loss(model(batch[0], scale=0.5), batch[1])

    for _ in range(EPOCHS):
        for batch in run.batches(loader):
            run.clear(optimizer)
            if whole:
                loss = run.forward_backward(loss_of, batch)
            else:
                loss = loss_of(batch)
                run.backward(loss)
                loss = loss.detach()
            run.step(optimizer, clip=0.5)
            losses.append(float(run.reduce(loss)) if reduces else None if loss is None else float(loss))
        losses.append(evaluated(run, model) if not whole else 0.0)
    run.end()
    return losses, model.state_dict()


def evaluated(run, model):
    model.eval()
    found = []
    with torch.no_grad():
        for inputs, _ in run.evaluation_batches(DataLoader(data(11), batch_size=2)):
            found.append(run.gather(model(inputs)))
    model.train()
    outputs = torch.cat(found) if found else torch.zeros(0)
    return float(outputs.double().sum()) if len(outputs) == 11 else None


def gan(run, batch):
    """Two models with an optimizer each; the generator's loss runs through the discriminator."""
    generator, discriminator = net(8, seed=1), net(1, seed=2)
    of_g = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_d = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=batch)
    run.setup(generator, discriminator, of_g, of_d, loader)
    losses = []
    bce = nn.functional.binary_cross_entropy_with_logits
    for _ in range(EPOCHS):
        for inputs, _ in run.batches(loader):
            ones = torch.ones(len(inputs), 1, device=inputs.device)
            fake = generator(inputs.flip(1))
            of_d.zero_grad()
            loss_d = bce(discriminator(inputs), ones) + bce(discriminator(fake.detach()), 0 * ones)
            run.backward(loss_d)
            of_d.step()
            of_g.zero_grad()
            loss_g = bce(discriminator(fake), ones)
            run.backward(loss_g)
            of_g.step()
            losses += [float(run.reduce(loss_d.detach())), float(run.reduce(loss_g.detach()))]
    run.end()
    return losses, {**generator.state_dict(), **{f"d.{k}": v for k, v in discriminator.state_dict().items()}}


def distillation(run, batch):
    """A student and a frozen teacher; the student's two forwards have one backward, and then one each."""
    student, teacher = net(4, seed=1), net(4, seed=2).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    loader = DataLoader(data(), batch_size=batch)
    run.setup(optimizer, loader, student=student, teacher=teacher)
    losses = []
    for _ in range(EPOCHS):
        for index, (inputs, _) in enumerate(run.batches(loader)):
            optimizer.zero_grad()
            targets = teacher(inputs)
            first = nn.functional.mse_loss(student(inputs), targets)
            second = nn.functional.mse_loss(student(inputs.flip(1)), targets)
            if index % 2:
                run.backward(first + second)
            else:
                run.backward(first)
                run.backward(second)
            optimizer.step()
            losses.append(float(run.reduce((first + second).detach())))
    run.end()
    return losses, student.state_dict()


LOOPS = {"regression": regression, "gan": gan, "distillation": distillation}


def by_run(name, strategy, *, accelerator="cpu", devices=2, accumulate=1, ranks_share_data=True, whole=False, **more):
    """Run the loop of that name on this rank, with the global batch of the plain one."""
    run = ByRun(accelerator=accelerator, strategy=strategy, devices=devices, accumulate_grad_batches=accumulate, **more)
    parts = devices if ranks_share_data else 1
    options = {"whole": True, "reduces": ranks_share_data} if whole else {}
    losses, state = LOOPS[name](run, BATCH // parts, **options)
    return losses, {key: value.cpu().clone() for key, value in state.items()}


def by_plain(name, accumulate=1, **options):
    losses, state = LOOPS[name](Plain(accumulate), BATCH, **options)
    return losses, copy.deepcopy(state)


def same(found, reference, tolerance=2e-5):
    (losses, state), (plain_losses, plain_state) = found, reference
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses), rtol=tolerance, atol=tolerance)
    for name, value in plain_state.items():
        torch.testing.assert_close(state[name], value, rtol=10 * tolerance, atol=10 * tolerance)
