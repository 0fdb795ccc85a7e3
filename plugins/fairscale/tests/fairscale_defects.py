"""In a rank of a test's world: use fairscale as its own pages say, in a process group, and return what comes of it."""

import copy
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def group(path):
    """A process group of all ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        yield rank
    finally:
        dist.barrier()
        dist.destroy_process_group()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def own_batch(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def mean_gradient(model):
    """Return the mean of the ranks' gradients of the first weight."""
    sum_ = sum(torch.autograd.grad(model(own_batch(rank)).square().mean(), model[0].weight)[0] for rank in range(2))
    return sum_ / 2


def reduced_after(path, buffer_size, set_to_none):
    """Return whether the owner has the averaged gradient after ``zero_grad`` and a second backward."""
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    with group(path) as rank:
        model = net()
        expected = mean_gradient(model)
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
        wrapper = ShardedDataParallel(model, optimizer, reduce_buffer_size=buffer_size)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            wrapper(own_batch(rank)).square().mean().backward()
        owner = optimizer._param_to_rank[model[0].weight]
        gradient = model[0].weight.grad
        return rank != owner or bool(torch.allclose(gradient, expected))


def clipped_norms(path):
    """Return two norms that OSS tells, the second when a parameter has a gradient that it hadn't at first."""
    from fairscale.optim import OSS

    with group(path):
        one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = OSS([one, other], optim=torch.optim.SGD, lr=0.1)
        one.grad = torch.ones(2)
        first = float(optimizer.clip_grad_norm(100.0))
        other.grad = torch.ones(2)
        return first, float(optimizer.clip_grad_norm(100.0))


def state_after_loading(path):
    """Return the entries of a state before and after OSS has loaded it."""
    from fairscale.optim import OSS

    with group(path):
        model = net()
        plain = torch.optim.Adam(model.parameters())
        model(own_batch(0)).sum().backward()
        plain.step()
        state = plain.state_dict()
        before = [len(entry) for entry in state["state"].values()]
        OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3).load_state_dict(state)
        return before, [len(entry) for entry in state["state"].values()]


def error_of_dtypes(path):
    from fairscale.optim import OSS

    with group(path):
        two = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        try:
            OSS([*two, nn.Parameter(torch.ones(2).double())], optim=torch.optim.SGD, lr=0.1)
        except AssertionError as error:
            return str(error)
        return ""


def error_of_an_empty_group(path):
    from fairscale.optim import OSS

    with group(path):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = OSS([{"params": []}, {"params": [parameter]}], optim=torch.optim.SGD, lr=0.1)
        try:
            optimizer.step()
        except IndexError:
            return "IndexError"
        return ""


def strides_and_gradient(path):
    """Return whether a turned parameter keeps its strides in OSS, and its gradient under a wrapper of before."""
    from fairscale.optim import OSS

    with group(path) as rank:
        model = nn.Linear(6, 4, bias=False)
        torch.manual_seed(0)
        model.weight = nn.Parameter(torch.randn(6, 4).t())
        expected = sum(torch.autograd.grad(model(own_batch(each)).square().mean(), model.weight)[0] for each in (0, 1))
        strides = model.weight.stride()
        wrapper = DistributedDataParallel(model)
        OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
        wrapper(own_batch(rank)).square().mean().backward()
        return model.weight.stride() == strides, bool(torch.allclose(model.weight.grad, expected / 2))


def unfrozen_parameter(path):
    """Return a parameter that was unfrozen after OSS was made, and stepped."""
    from fairscale.optim import OSS

    with group(path):
        one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
        optimizer = OSS([one, other], optim=torch.optim.SGD, lr=1.0)
        other.requires_grad_(True)
        other.grad = torch.ones(2)
        optimizer.step()
        return other.detach().clone()


def in_another_order(path):
    """Return whether each owner has the averaged gradients of two layers that the ranks use in another order."""
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    with group(path) as rank:
        torch.manual_seed(0)
        model = nn.ModuleDict({"large": nn.Linear(6, 64), "a": nn.Linear(6, 6, bias=False)})
        model["b"] = nn.Linear(6, 6, bias=False)
        order = [model["large"].weight, model["a"].weight, model["b"].weight, model["large"].bias]

        def loss(which):
            x = own_batch(which)
            for name in ("a", "b") if which == 0 else ("b", "a"):
                x = torch.tanh(model[name](x))
            return model["large"](x).square().mean()

        expected = sum(torch.autograd.grad(loss(which), model["a"].weight)[0] for which in (0, 1)) / 2
        optimizer = OSS(order, optim=torch.optim.SGD, lr=0.1)
        model.forward = loss
        ShardedDataParallel(model, optimizer, reduce_buffer_size=0)(rank).backward()
        if optimizer._param_to_rank[model["a"].weight] != rank:
            return True
        return bool(torch.allclose(model["a"].weight.grad, expected))


def left_by_a_nested_backward(path):
    """Return how many messages nobody waits for after a backward through a checkpointed last layer."""
    from fairscale.nn import ShardedDataParallel, checkpoint_wrapper
    from fairscale.optim import OSS

    with group(path) as rank:
        model = net()
        checkpoint_wrapper(model[2])
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
        wrapper = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)
        wrapper._try_consume_work_handle = lambda: None  # as where messages take their time
        F.mse_loss(wrapper(own_batch(rank)), torch.zeros(4, 2)).backward()
        left = len(wrapper._work_handles)
        wrapper._consume_work_handles()
        return left


def flag_after_an_error(path):
    """Return whether ``no_sync`` that an error has left still holds."""
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    with group(path):
        model = net()
        wrapper = ShardedDataParallel(model, OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1))
        try:
            with wrapper.no_sync():
                raise ValueError
        except ValueError:
            pass
        return wrapper._should_accumulate_grads


def error_of_fully_sharded(path):
    from fairscale.nn import FullyShardedDataParallel

    with group(path) as rank:
        model = FullyShardedDataParallel(net(), compute_device=torch.device("cpu"))
        try:
            model(own_batch(rank))
        except KeyError as error:
            return str(error)
        return ""


def recomputed_dtypes():
    """Return the dtypes in which a checkpointed layer computes under autocast: at first, and again in backward."""
    from fairscale.nn import checkpoint_wrapper

    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            seen.append(str(output.dtype))
            return output

    layer = checkpoint_wrapper(Spy(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.ones(2, 4, requires_grad=True))
    output.float().sum().backward()
    return seen


def output_of_a_copy():
    """Return whether a copy of a checkpointed layer computes with the first one's weights."""
    from fairscale.nn import checkpoint_wrapper

    layer = checkpoint_wrapper(nn.Linear(4, 4))
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.weight.zero_(), copied.bias.zero_()
    return bool(copied(torch.ones(2, 4)).any())


def statistics_after_an_error():
    """Return whether a batch norm of a checkpointed layer keeps running statistics after an error in the layer."""
    from fairscale.nn import checkpoint_wrapper

    layer = checkpoint_wrapper(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    layer[0]._check_input_dim = lambda x: 1 / 0
    try:
        layer(torch.ones(2, 4, requires_grad=True))
    except ZeroDivisionError:
        return layer[0].track_running_stats


def second_backward(path):
    """Return whether a second backward of one forward leaves the averaged gradients with their owner."""
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    with group(path) as rank:
        model = net()
        expected = 2 * mean_gradient(model)
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
        loss = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)(own_batch(rank)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradient = model[0].weight.grad
        return rank != optimizer._param_to_rank[model[0].weight] or bool(torch.allclose(gradient, expected))
