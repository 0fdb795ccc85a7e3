"""What torch and its users expect of a device: indices, torch.accelerator, streams, autocast, files, transforms."""

import copy
import io
import pickle
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from torchhal_simulator import counting, load, simulate


@pytest.fixture
def module(device):
    return torch.get_device_module(device)


def test_it_says_that_it_is_a_simulator(device, module):
    assert module.__simulator__
    assert module.get_device_name() == module.get_device_properties(device).name
    assert module.get_device_name().startswith(f"simulated {device.type}")
    assert load(device.type) is module is getattr(torch, device.type)


# -- devices and their indices ------------------------------------------------------------------------------------


def test_accelerator(device, module):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device(device.type)
    assert torch.accelerator.device_count() == module.device_count() == 2
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream() == module.current_stream()
    before = torch.accelerator.memory_allocated()
    x = torch.ones(128, device=device)
    assert torch.accelerator.memory_allocated() == before + 512 == before + x.nbytes
    assert torch.accelerator.get_memory_info() == module.mem_get_info()
    with counting(device.type) as counted:
        torch.accelerator.synchronize()
    assert counted.synchronizations == 1


def test_the_current_device(device, second, module):
    assert torch.ones(1, device=device.type).device == device
    with module.device(second):
        assert torch.ones(1, device=device.type).device == second
        assert torch.ones(1).to(device.type).device == second
        assert torch.ones(1, device=device).add(1).device == device
        with torch.accelerator.device_index(0):
            assert module.current_device() == 0
        assert torch.accelerator.current_device_index() == 1
    assert module.current_device() == 0
    module.set_device(1)
    assert module.current_device() == 1
    module.set_device(device)
    module.set_device(-1)  # nothing, as with CUDA
    assert module.current_device() == 0
    with pytest.raises(ZeroDivisionError), module.device(1):
        raise ZeroDivisionError
    assert module.current_device() == 0


def test_the_current_device_is_of_one_thread(second, module):
    from concurrent.futures import ThreadPoolExecutor

    with module.device(second), ThreadPoolExecutor(1) as pool:
        assert pool.submit(module.current_device).result() == 0


def test_backward_runs_where_the_forward_ran(device, second, module):
    x = torch.randn(3, device=second, requires_grad=True)
    y = (x * x).to(device)
    (y * 2).sum().backward()
    assert x.grad.device == second
    assert torch.equal(x.grad.cpu(), 4 * x.detach().cpu())
    assert module.current_device() == 0


BEYOND = {
    "set_device": lambda module, kind: module.set_device(64),
    "device": lambda module, kind: module.device(64).__enter__(),
    "accelerator": lambda module, kind: torch.accelerator.set_device_index(64),
    "empty": lambda module, kind: torch.empty(1, device=f"{kind}:64"),
    "to": lambda module, kind: torch.ones(1).to(f"{kind}:64"),
    "memory_allocated": lambda module, kind: module.memory_allocated(64),
    "mem_get_info": lambda module, kind: module.mem_get_info(64),
    "get_device_properties": lambda module, kind: module.get_device_properties(64),
    "Stream": lambda module, kind: module.Stream(device=64),
    "current_stream": lambda module, kind: module.current_stream(64),
    "synchronize": lambda module, kind: module.synchronize(64),
    "Generator": lambda module, kind: torch.Generator(f"{kind}:64"),
    "get_rng_state": lambda module, kind: module.get_rng_state(64),
}


@pytest.mark.parametrize("call", BEYOND)
def test_an_index_beyond_the_last_is_refused(call, device, module):
    with pytest.raises(RuntimeError, match="invalid device ordinal 64"):
        BEYOND[call](module, device.type)
    assert module.current_device() == 0


def test_another_devices_name_is_refused(module):
    with pytest.raises(ValueError, match=r"must be a .* device"):
        module.memory_allocated("cpu")


def test_no_devices(device, module):
    with simulate(devices=0):
        assert not module.is_available()
        assert not torch.accelerator.is_available()
        assert module.device_count() == 0
        with pytest.raises(RuntimeError, match="invalid device ordinal 0"):
            torch.ones(1, device=device)
        torch.manual_seed(0)
    assert module.is_available()


# -- streams and events -------------------------------------------------------------------------------------------


def test_streams(device, module):
    default, stream = module.default_stream(), module.Stream()
    assert module.current_stream() == default != stream
    assert stream.device == device
    with module.stream(stream):
        assert module.current_stream() == stream
        x = torch.ones(3, device=device)
    assert module.current_stream() == default
    with stream:
        assert torch.accelerator.current_stream() == stream
    x.record_stream(stream)
    stream.wait_stream(default)
    assert stream.query()
    with module.stream(None):
        assert module.current_stream() == default


def test_streams_of_another_index(device, second, module):
    stream = module.Stream(device=1)
    with module.stream(stream):
        assert module.current_device() == 1
        assert module.current_stream() == stream
    assert module.current_device() == 0
    assert module.current_stream(1) == module.default_stream(1)
    with pytest.raises(RuntimeError, match="can't use a tensor"):
        torch.ones(1, device=device).record_stream(stream)


def test_events(module):
    first, last, untimed = module.Event(enable_timing=True), module.Event(enable_timing=True), module.Event()
    with pytest.raises(ValueError, match="must be recorded"):
        first.elapsed_time(last)
    first.record()
    last.record(module.Stream())
    untimed.record()
    module.current_stream().wait_event(last)
    last.synchronize()
    assert last.query()
    assert first.elapsed_time(last) > 0
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(untimed)


LOST = {
    "event.query": lambda event, stream: event.query(),
    "event.synchronize": lambda event, stream: event.synchronize(),
    "event.wait": lambda event, stream: event.wait(stream),
    "event.elapsed_time": lambda event, stream: event.elapsed_time(event),
    "stream.query": lambda event, stream: stream.query(),
    "stream.synchronize": lambda event, stream: stream.synchronize(),
}


@pytest.mark.parametrize("call", LOST)
def test_a_lost_device_answers_nothing(call, device, module):
    event, stream = module.Event(enable_timing=True), module.Stream()
    event.record(stream)
    LOST[call](event, stream)
    with simulate(lost=0), pytest.raises(RuntimeError, match="device 0 was lost"):
        LOST[call](event, stream)
    LOST[call](event, stream)
    module.Event().synchronize()  # was never recorded, so it is of no device


# -- counters -----------------------------------------------------------------------------------------------------


def test_counters(device):
    host, pinned = torch.ones(4), torch.ones(4).pin_memory()

    def counts(function):
        with counting(device.type) as counted:
            function()
        return counted.operators, counted.h2d, counted.d2h, counted.d2d, counted.synchronizations

    x = host.to(device)
    assert counts(lambda: x + x) == (1, 0, 0, 0, 0)
    assert counts(lambda: x[1:].view(3, 1).t().expand(4, 3)) == (0, 0, 0, 0, 0)
    assert counts(lambda: torch.empty(3, device=device)) == (0, 0, 0, 0, 0)
    assert counts(lambda: host.to(device)) == (1, 1, 0, 0, 1)
    assert counts(lambda: pinned.to(device, non_blocking=True)) == (1, 1, 0, 0, 0)
    assert counts(x.cpu) == (1, 0, 1, 0, 1)
    assert counts(lambda: x.to("cpu", non_blocking=True)) == (1, 0, 1, 0, 0)  # torch pins the new tensor
    assert counts(lambda: host.copy_(x, non_blocking=True)) == (1, 0, 1, 0, 1)
    assert counts(lambda: pinned.copy_(x, non_blocking=True)) == (1, 0, 1, 0, 0)
    assert counts(x.clone) == (1, 0, 0, 1, 0)
    assert counts(x[0].item) == (1, 0, 1, 0, 1)
    assert counts(x.nonzero) == (1, 0, 1, 0, 1)
    assert counts(torch.get_device_module(device).synchronize) == (0, 0, 0, 0, 1)
    with counting(device.type) as counted:
        assert x.sum() == 4  # bool() of the result
    assert counted.d2h == counted.synchronizations == 1


class Operands:
    def __init__(self, device):
        self.x = torch.arange(4.0, device=device)
        self.twin = self.x.clone()
        self.matrix = torch.ones(4, 2, device=device)
        self.index = torch.tensor([0, 2], device=device)
        self.mask = torch.tensor([True, False, True, False], device=device)
        self.bytes = self.mask.to(torch.uint8)
        self.two = torch.ones(2, device=device)
        self.number = torch.ones((), device=device)
        self.cpu_index, self.cpu_mask, self.cpu_number = torch.tensor([0, 2]), self.mask.cpu(), torch.ones(())
        self.cpu_matrix_mask = torch.ones(4, 2, dtype=torch.bool)


def setitem(x, index, value):
    x[index] = value


# What the host waits for on CUDA without having asked for it: h2d, d2h, synchronizations.
HIDDEN = {
    "x[mask]": (lambda o: o.x[o.mask], (0, 1, 1)),
    "x[bytes]": (lambda o: o.x[o.bytes], (0, 1, 1)),
    "x[mask, mask]": (lambda o: o.matrix[o.mask, o.mask[:2]], (0, 2, 2)),
    "x[index]": (lambda o: o.x[o.index], (0, 0, 0)),
    "x[index on the CPU]": (lambda o: o.x[o.cpu_index], (1, 0, 1)),
    "x[mask on the CPU]": (lambda o: o.x[o.cpu_mask], (1, 0, 1)),
    "x[mask on the CPU of two dimensions]": (lambda o: o.matrix[o.cpu_matrix_mask], (2, 0, 2)),
    "x[mask] = tensor": (lambda o: setitem(o.x, o.mask, o.two), (0, 1, 1)),
    "x[bytes] = tensor": (lambda o: setitem(o.x, o.bytes, o.two), (0, 1, 1)),
    "x[mask] = tensor of no dimension": (lambda o: setitem(o.x, o.mask, o.number), (0, 1, 1)),
    "x[mask] = 0.0": (lambda o: setitem(o.x, o.mask, 0.0), (0, 0, 0)),  # a masked_fill
    "x[mask] = tensor on the CPU": (lambda o: setitem(o.x, o.mask, o.cpu_number), (0, 0, 0)),
    "x[index] = tensor": (lambda o: setitem(o.x, o.index, o.two), (0, 0, 0)),
    "x[index on the CPU] = tensor": (lambda o: setitem(o.x, o.cpu_index, o.two), (1, 0, 1)),
    "index_put_(mask)": (lambda o: o.x.index_put_((o.mask,), o.two), (0, 1, 1)),
    "index_put_(mask), accumulating": (
        lambda o: o.x.index_put_((o.mask,), o.cpu_number.to(o.x.device), accumulate=True),
        (1, 1, 2),
    ),
    "index_put(mask)": (lambda o: o.x.index_put((o.mask,), o.two), (0, 1, 1)),
    "_unsafe_index_put(mask)": (lambda o: torch.ops.aten._unsafe_index_put(o.x, [o.mask], o.two), (0, 1, 1)),
    "_index_put_impl_(mask)": (lambda o: torch.ops.aten._index_put_impl_(o.x, [o.mask], o.two), (0, 1, 1)),
    "masked_fill": (lambda o: o.x.masked_fill(o.mask, 1.0), (0, 0, 0)),
    "where": (lambda o: torch.where(o.mask, o.x, 0.0), (0, 0, 0)),
    "where of a condition": (lambda o: torch.where(o.mask), (0, 1, 1)),
    "masked_select": (lambda o: o.x.masked_select(o.mask), (0, 1, 1)),
    "nonzero": (lambda o: o.x.nonzero(), (0, 1, 1)),
    "argwhere": (lambda o: torch.argwhere(o.x), (0, 1, 1)),
    "unique": (lambda o: o.x.unique(), (0, 1, 1)),
    "bincount": (lambda o: o.index.bincount(), (0, 1, 1)),
    "repeat_interleave": (lambda o: o.two.repeat_interleave(o.index), (0, 1, 1)),
    "repeat_interleave with its size": (lambda o: o.two.repeat_interleave(o.index, output_size=2), (0, 0, 0)),
    "repeat_interleave by a number": (lambda o: o.x.repeat_interleave(2), (0, 0, 0)),
    "equal": (lambda o: torch.equal(o.x, o.twin), (0, 1, 1)),
    "equal of two shapes": (lambda o: torch.equal(o.x, o.two), (0, 0, 0)),
    "equal to itself": (lambda o: torch.equal(o.x, o.x), (0, 0, 0)),
    "allclose": (lambda o: torch.allclose(o.x, o.twin), (0, 1, 1)),
    "item": (lambda o: o.number.item(), (0, 1, 1)),
    "bool()": (lambda o: bool(o.number), (0, 1, 1)),
    "tolist": (lambda o: o.x.tolist(), (0, 1, 1)),
    "gather": (lambda o: o.x.gather(0, o.index), (0, 0, 0)),
    "index_select": (lambda o: o.x.index_select(0, o.index), (0, 0, 0)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_synchronisations(name, device):
    work, expected = HIDDEN[name]
    operands = Operands(device)
    with counting(device.type) as counted:
        work(operands)
    assert (counted.h2d, counted.d2h, counted.synchronizations) == expected


def test_copies_between_devices_are_counted(device, second):
    x = torch.ones(4, device=device)
    with counting() as counted:
        x.to(second)
    assert (counted.d2d, counted.h2d, counted.d2h, counted.synchronizations) == (1, 0, 0, 0)


# -- pinned memory ------------------------------------------------------------------------------------------------


def test_pinned_memory(device):
    x = torch.arange(6.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert not x.is_pinned()
    assert torch.equal(pinned, x)
    assert torch.empty(3, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError, match=r"[Oo]nly dense CPU tensors can be pinned"):
        x.to(device).pin_memory()
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(3, device=device, pin_memory=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pins_its_batches(workers, device):
    from torch.utils.data import DataLoader, TensorDataset

    torch.ones(1, device=device)  # the workers are forked after a use, and use the device no more
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True, num_workers=workers)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat([batch.to(device, non_blocking=True) for batch in batches]).cpu(), torch.arange(8.0))


# -- separate from the CPU ----------------------------------------------------------------------------------------


def test_device_memory_is_not_the_hosts(device):
    x = torch.ones(3)
    y = x.to(device)
    y.add_(1)
    assert x.sum() == 3
    assert y.cpu().data_ptr() != y.data_ptr() != x.data_ptr()
    with pytest.raises(TypeError, match=r"use Tensor\.cpu\(\)|Use Tensor\.cpu\(\)"):
        y.numpy()
    with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
        numpy.asarray(y)


@pytest.mark.parametrize("make", [
    lambda device: torch.eye(2, device=device).to_sparse(),
    lambda device: torch.eye(2).to_sparse().to(device),
    lambda device: torch.empty(2, device=device, layout=torch.sparse_coo),
    lambda device: torch.sparse_coo_tensor([[0]], [1.0], (2,), device=device),
    lambda device: torch.eye(2, device=device).to_mkldnn(),
    lambda device: torch.quantize_per_tensor(torch.ones(2, device=device), 0.1, 0, torch.qint8),
    lambda device: nn.Embedding(2, 2, sparse=True, device=device)(torch.zeros(1).long().to(device)).sum().backward(),
], ids=["to_sparse", "to", "empty", "sparse_coo_tensor", "to_mkldnn", "quantize", "gradient"])  # fmt: skip
def test_dense_tensors_only(make, device):
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        make(device)


def test_an_operator_without_a_cpu_kernel_says_so(device):
    with pytest.raises(NotImplementedError, match=r"no kernel for aten::_cudnn_init_dropout_state"):
        torch._cudnn_init_dropout_state(0.5, True, 0, dtype=torch.uint8, device=device)


def test_names_of_the_device(device, second):
    x = torch.ones(2).sim()
    assert x.is_sim and x.get_device() == 0 and x.type() == "torch.sim.FloatTensor"
    assert nn.Linear(1, 1).sim().weight.device == device
    assert torch.ones(1).sim(1).device == second
    assert repr(x) == "tensor([1., 1.], device='sim:0')"


# -- files and copies ---------------------------------------------------------------------------------------------


def test_save_and_load(device, module):
    x = torch.arange(4.0, device=device)
    buffer = io.BytesIO()
    torch.save({"x": x, "view": x[1:], "parameter": nn.Parameter(x)}, buffer)

    def loaded(**options):
        buffer.seek(0)
        return torch.load(buffer, **options)

    for place in (None, "cpu", device, device.type, lambda storage, place: storage):
        got = loaded(map_location=place, weights_only=not callable(place))
        where = torch.device("cpu") if place == "cpu" or callable(place) else device
        assert got["x"].device == got["parameter"].device == where
        assert torch.equal(got["x"].cpu(), x.cpu())
        assert got["view"].untyped_storage().data_ptr() == got["x"].untyped_storage().data_ptr()
    with simulate(devices=0), pytest.raises(RuntimeError, match="map_location"):
        loaded()


def test_load_onto_another_index(device, second):
    buffer = io.BytesIO()
    torch.save(torch.ones(2, device=second), buffer)
    for place, expected in ((None, second), ({"sim:1": "sim:0"}, device), ("sim:0", device)):
        buffer.seek(0)
        assert torch.load(buffer, map_location=place).device == expected
    buffer.seek(0)
    with simulate(devices=1), pytest.raises(RuntimeError, match="map_location"):
        torch.load(buffer)


def test_copies(device):
    x = torch.randn(3, device=device, requires_grad=True)
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert copied.device == device
        assert copied.requires_grad
        assert torch.equal(copied, x)
        assert copied.data_ptr() != x.data_ptr()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(device)
    twin = copy.deepcopy(model)
    twin[0].weight.data.zero_()
    assert model[0].weight.abs().sum() > 0


def test_another_process_gets_no_tensor_by_its_handle(device):
    import torch.multiprocessing as multiprocessing

    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with pytest.raises(RuntimeError, match="only available on CPU"):
        queue.put(torch.ones(2, device=device))
    queue.put(torch.ones(2, device=device).cpu())


# -- autocast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Linear(5, 5)).to(device)
    x = torch.randn(2, 3, 5, device=device)
    with torch.autocast(device.type, dtype=dtype):
        y = model(x)
        assert y.dtype == (y @ y.mT).dtype == dtype
        assert y.softmax(-1).dtype == y.exp().dtype == torch.float32
        assert nn.functional.layer_norm(y, (5,)).dtype == nn.functional.mse_loss(y, y).dtype == torch.float32
        assert torch.cat([x[:1, :1, :1], y[:1, :1, :1]]).dtype == torch.float32
        assert (torch.ones(2) @ torch.ones(2)).dtype == torch.float32  # not the CPU's
        with torch.autocast(device.type, enabled=False):
            assert (x @ x.mT).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_wrapped_numbers_and_promotion(device):
    number = torch.tensor(1.5, device=device)
    assert (number * 2.0).dtype == torch.float32
    assert (torch.tensor(1, device=device) * 2.5).dtype == torch.float32
    low = torch.ones(2, device=device, dtype=torch.bfloat16)
    assert (low * 2.0).dtype == (low * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.bfloat16
    assert (low * torch.ones(2, device=device)).dtype == torch.float32
    assert (torch.ones(2, device=device, dtype=torch.int32) + torch.tensor(1)).dtype == torch.int32


# -- transforms and compilation -----------------------------------------------------------------------------------


def test_functional_transforms(device):
    weight, x = torch.randn(4, 4), torch.randn(3, 4)

    def check(transform):
        def on(place):
            w = weight.to(place)
            return transform(lambda v: (w @ v).tanh().pow(2).sum(), x.to(place))

        result, expected = on(device), on("cpu")
        assert result.device == device
        assert torch.equal(result.cpu(), expected)

    check(lambda f, x: vmap(f)(x))
    check(lambda f, x: vmap(grad(f))(x))
    check(lambda f, x: jvp(f, (x[0],), (x[1],))[1])
    check(lambda f, x: vjp(f, x[0])[1](torch.ones((), device=x.device))[0])
    check(lambda f, x: jacrev(grad(f))(x[0]))
    check(lambda f, x: jacfwd(f)(x[0]))
    check(lambda f, x: hessian(f)(x[0]))
    model = nn.Linear(4, 2).to(device)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = grad(lambda parameters: functional_call(model, parameters, (x.to(device),)).sum())(parameters)
    assert torch.allclose(loss["weight"][0].cpu(), x.sum(0))


def test_random_numbers_under_vmap(device):
    def drop(row):
        return nn.functional.dropout(row, 0.5)

    x = torch.ones(4, 64, device=device)
    same, different = (vmap(drop, randomness=how)(x) for how in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])


def test_gradcheck(device):
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64, device=device, requires_grad=True)
    kernel = torch.randn(1, 1, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(nn.functional.conv2d, (x, kernel), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(nn.functional.conv2d, (x, kernel))


@pytest.mark.timeout(300)
def test_compiled_without_code_generation(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).to(device)
    twin = copy.deepcopy(model)
    x = torch.randn(5, 1, 4, 4, device=device)
    y, expected = torch.compile(model, backend="aot_eager", fullgraph=True)(x), twin(x)
    assert y.device == device
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for compiled, eager in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad)


# -- fork ---------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, torch
from torchhal_simulator import load
module = load({flavour!r})
assert module.is_available() and module.device_count() and torch.accelerator.current_accelerator()
torch.manual_seed(0)
module.memory_allocated()
{use}
pid = os.fork()
if pid == 0:
    try:
        print(module._is_in_bad_fork(), torch.ones(2, device={flavour!r}).sum().item(), flush=True)
    except RuntimeError as error:
        print(module._is_in_bad_fork(), error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(torch.ones(2, device={flavour!r}).sum().item())
"""


@pytest.mark.parametrize(("use", "said"), [
    ("", "False 2.0"),
    ("torch.ones(1, device='{flavour}')", "True Cannot use the simulated"),
])  # fmt: skip
def test_fork(use, said, device):
    script = FORK.format(flavour=device.type, use=use.format(flavour=device.type))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    child, parent = done.stdout.splitlines()
    assert child.startswith(said)
    assert parent == "2.0"


# -- backward on a device that appears late -----------------------------------------------------------------------

LATE = """
import threading, torch
from torchhal_simulator import load, simulate
load("sim")

def backward(index):
    x = torch.ones(3, device=f"sim:{{index}}", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]

{code}
print("done")
"""


@pytest.mark.parametrize("code", [
    # the engine starts while there are fewer devices than there were, and will be again
    """
with simulate(devices=6):
    x = torch.ones(3, device="sim:5")
backward(0)
with simulate(devices=6):
    backward(5)
""",
    """
with simulate(devices=0):
    torch.ones(1, requires_grad=True).sum().backward()
with simulate(devices=3):
    backward(2)
with simulate(devices=64):
    backward(63)
    backward(2)
""",
    # the engine's threads are made while others run backward
    """
from concurrent.futures import ThreadPoolExecutor
end = threading.Event()
def repeat():
    while not end.is_set():
        backward(0)
with ThreadPoolExecutor(8) as pool:
    running = [pool.submit(repeat) for _ in range(2)]
    with simulate(devices=64):
        for first in range(2, 64, 6):
            list(pool.map(backward, range(first, min(64, first + 6))))
        end.set()
        [one.result() for one in running]
""",
], ids=["shrinks and grows", "grows from none", "while others run"])  # fmt: skip
def test_backward_on_late_devices(code, device):
    if device.type == "hpu":
        pytest.skip("one index per process")
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(code=code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr
