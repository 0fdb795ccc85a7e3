"""What the stub keeps of poptorch, in the order of its README."""

import copy
import logging

import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from poptorch_stub import machine

SAID = []
handler = logging.Handler()
handler.emit = lambda record: SAID.append(record.getMessage())
logging.getLogger("poptorch").addHandler(handler)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x, y=None):
        self.calls += 1
        out = self.linear(x)
        return out if y is None else (out, F.cross_entropy(out, y))


def made():
    torch.manual_seed(0)
    return Model()


def data(count=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def options(iterations=1, accumulation=1, replicas=1):
    given = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    given.Training.gradientAccumulation(accumulation)
    return given


def refused(kind, words, function, *args, **given):
    try:
        function(*args, **given)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {words}")


def stepped(model, batches, lr=0.1, momentum=0.9):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model.linear(x), y).backward()
        optimizer.step()
    return model


def close(a, b):
    assert (a.detach() - b.detach()).abs().max() < 1e-6


# 1: the loss
class Losses(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 3), kind

    def forward(self, x, y):
        out = self.linear(x)
        if self.kind == "none":
            return out.sum()
        if self.kind == "marked":
            return poptorch.identity_loss(out.square(), reduction="mean")
        first, second = F.cross_entropy(out, y), F.mse_loss(out, torch.zeros_like(out))
        return (first, second) if self.kind == "two" else poptorch.identity_loss(first + second, reduction="none")


x, y = data()
refused(poptorch.Error, "Couldn't find a loss in graph!", poptorch.trainingModel(Losses("none")), x, y)
refused(poptorch.Error, "2 losses that lead to no common one", poptorch.trainingModel(Losses("two")), x, y)
for kind in ("joined", "marked"):
    executor = poptorch.trainingModel(Losses(kind))
    assert executor(x, y).shape == ()
    executor.destroy()

# 2, 3, 4: one call is the whole step; how a batch is dealt out; what comes back
model, reference = made(), made()
executor = poptorch.trainingModel(model, options(2, 3, 2), poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
out, loss = executor(x, y)
assert out.shape == (4, 3) and loss.shape == (2,), "the last result of each replica"
stepped(reference, [(x[:12], y[:12]), (x[12:], y[12:])])
close(model.linear.weight, reference.linear.weight)
refused(poptorch.Error, "there is no backward()", loss.backward)
refused(AssertionError, "must be a multiple of 12", poptorch.trainingModel(made(), options(2, 3, 2)), x[:23], y[:23])
executor.destroy()

model, reference = made(), made()
summed = options(1, 2)
summed.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
summed.outputMode(poptorch.OutputMode.All)
executor = poptorch.trainingModel(model, summed, torch.optim.SGD(model.parameters(), lr=0.1))
out, loss = executor(x, y)
assert loss.shape == (2,) and out.shape == (24, 3)
stepped(reference, [(x, y)], lr=0.2, momentum=0)
close(model.linear.weight, reference.linear.weight)
executor.destroy()

inference = poptorch.inferenceModel(made(), options(4))
close(inference(x), made()(x))
inference.destroy()
for mode, shape in (("Final", (6, 3)), ("Sum", (6, 3)), ("EveryN", (12, 3)), ("Default", (24, 3))):
    given = options(4).outputMode(poptorch.OutputMode[mode], 2)
    inference = poptorch.inferenceModel(made(), given)
    assert inference(x).shape == shape, mode
    inference.destroy()


class Wide(nn.Module):
    def forward(self, x):
        return x.double() * 2, x.argmax(1)


inference = poptorch.inferenceModel(Wide())
assert [tensor.dtype for tensor in inference(x)] == [torch.float32, torch.int32]
inference.destroy()

# 5: all is fixed at the first call
model = made()
executor = poptorch.trainingModel(model)
for _ in range(3):
    executor(x, y)
assert model.calls == 0 and executor._model.calls == 1, "Python ran once"
refused(poptorch.Error, "must be a tensor of shape", executor, x[:12], y[:12])
refused(poptorch.Error, "must be a tensor of shape", executor, x.half(), y)
executor.destroy()


class Scaled(nn.Module):
    def forward(self, x, factor):
        return x * factor


inference = poptorch.inferenceModel(Scaled())
inference(x, 2)
refused(poptorch.Error, "must be 2 (got 3)", inference, x, 3)
inference.destroy()


class Asking(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


refused(poptorch.Error, "asks for the value of a tensor", poptorch.inferenceModel(Asking()), x)

# 6, 7: weights and optimizer on the device
model = made()
optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
executor = poptorch.trainingModel(model, None, optimizer)
start = torch.Tensor(copy.deepcopy(made()).linear.weight.detach())
executor(x, y)
assert executor._dirty_host_weights and not torch.equal(model.linear.weight, start), "read, it is brought up to date"
refused(RuntimeError, "in training by another executor", poptorch.trainingModel, model)
optimizer.param_groups[0]["lr"] = 0.0
before = model.linear.weight.detach().clone()
executor(x, y)
assert not torch.equal(model.linear.weight, before), "the device hasn't heard of it"
executor.setOptimizer(optimizer)
before = model.linear.weight.detach().clone()
executor(x, y)
assert torch.equal(model.linear.weight, before)
state = optimizer.state_dict()
assert set(state) == {"ipu_state", "ipu_param", "state", "param_groups"} and not state["state"]
assert float(state["ipu_state"]["step___linear.weight"]) == 3
refused(RuntimeError, "has no ipu_state", optimizer.load_state_dict, torch.optim.Adam(made().parameters()).state_dict())
following = poptorch.inferenceModel(model)
close(following(x), model.linear(x))
executor.destroy()
following.destroy()
assert type(model) is Model and type(model.linear.weight) is nn.Parameter
refused(AssertionError, "the device has SGD", poptorch.trainingModel, made(), None, torch.optim.Adagrad([start]))

# 8: accumulation, pipelines, options
refused(poptorch.Error, "must be 1 for inferenceModel", poptorch.inferenceModel, made(), options(1, 2))


class Split(Model):
    def forward(self, x, y=None):
        with poptorch.Block("a", ipu_id=0):
            hidden = x * 2
        poptorch.Block.start("b", ipu_id=1)
        return super().forward(hidden, y)


refused(poptorch.Error, "must be at least 3", poptorch.trainingModel(Split(), options(1, 2)), x, y)
refused(poptorch.Error, "must be at least 2", poptorch.inferenceModel(Split()), x)
given = options(1, 2).setExecutionStrategy(poptorch.ShardedExecution())
executor = poptorch.trainingModel(Split(), given)
executor(x, y)
assert machine.free() == 2, "it is on two"
refused(AttributeError, "Can't modify frozen Options", given.deviceIterations, 3)
refused(AssertionError, "must be of type int", poptorch.Options().deviceIterations, "3")
given.clone().deviceIterations(3)

# 9: a finite number
second = poptorch.trainingModel(made(), options(1, 1, 4))
refused(poptorch.Error, "2 of 4 are free", second, x, y)
executor.detachFromDevice()
refused(poptorch.Error, "not attached", executor.detachFromDevice)
second(x, y)
second.destroy()
executor.attachToDevice()
executor.destroy()
assert machine.free() == 4
refused(poptorch.Error, "machine has 4", poptorch.trainingModel(made(), options(1, 1, 8)), x, y)

# 10: inputs that require gradients; the user's own module
executor = poptorch.trainingModel(made())
executor(x.clone().requires_grad_(), y)
assert any("requires gradients" in line for line in SAID)
executor.destroy()


# buffers, and random numbers of its own
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return F.dropout(x, 0.5) + 0 * self.count


state = torch.get_rng_state()
inference = poptorch.inferenceModel(Counting(), options().randomSeed(3))
torch.set_rng_state(state)
first, second = inference(x), inference(x)
assert not torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)
inference.copyWeightsToHost()
assert float(inference.model.count) == 2
kept = inference.rng_state
third = inference(x)
inference.rng_state = kept
assert torch.equal(inference(x), third)
inference.destroy()
refused(poptorch.Error, "broadcastBuffers(False)", poptorch.inferenceModel(Counting(), options(1, 1, 2)), x)
inference = poptorch.inferenceModel(Counting(), options(1, 1, 2).broadcastBuffers(False))
inference(x)
inference.destroy()
loader = poptorch.DataLoader(options(2, 3, 2), torch.utils.data.TensorDataset(x, y), batch_size=2)
assert loader.combinedBatchSize == 24 and len(loader) == 1
print("all right")
