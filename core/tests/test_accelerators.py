"""Accelerators: the CPU, and the contract's default bodies over a stand-in for a torch device module.

Ids such as ACC-05 are those of the conformance checks.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import pickle
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import hardware
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchhal.accelerators import Accelerator, CPUAccelerator
from torchhal.errors import AcceleratorUnavailableError, ConfigurationError
from torchhal.plugin import Availability
from torchhal.pytree import map_tensors, move_module, move_to_device

CPU = torch.device("cpu")
META = torch.device("meta")  # tensors really move there, and nowhere by accident


class StandIn(types.ModuleType):
    """A torch device module of three devices that is strict where hardware is: use before set-up, wrong index."""

    def __init__(self, count: int = 3) -> None:
        super().__init__("torch.meta")
        self.count = count
        self.current = 0
        self.initialised = False
        self.generators = [torch.Generator().manual_seed(99) for _ in range(count)]
        self.allocated = [0] * count
        self.peak = [0] * count
        self.calls: list[tuple[str, int]] = []

    def _index(self, device: torch.device | None) -> int:
        assert self.initialised, "the device was used before set_device()"
        if device is None:
            return self.current
        assert device.type == "meta"
        assert device.index is not None
        if device.index >= self.count:
            raise RuntimeError(f"invalid device ordinal {device.index}")
        return device.index

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.initialised

    def set_device(self, device: torch.device) -> None:
        self.initialised = True
        self.current = self._index(device)

    def synchronize(self, device: torch.device | None = None) -> None:
        self.calls.append(("synchronize", self._index(device)))

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache", self._index(None)))

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device | None = None) -> torch.Tensor:
        return self.generators[self._index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        self.generators[self._index(device)].set_state(state)

    def memory_allocated(self, device: torch.device | None = None) -> int:
        return self.allocated[self._index(device)]

    def max_memory_allocated(self, device: torch.device | None = None) -> int:
        return self.peak[self._index(device)]

    def reset_peak_memory_stats(self, device: torch.device | None = None) -> None:
        index = self._index(device)
        self.peak[index] = self.allocated[index]


class Fake(Accelerator):
    """All that an author writes for hardware that torch speaks to."""

    name: ClassVar[str] = "fake"
    device_type: ClassVar[str] = "meta"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[types.ModuleType], None]]:
    """Puts a module where torch looks for the device's; torch remembers what it found, so it has to forget."""

    def put(module: types.ModuleType) -> None:
        monkeypatch.setattr(torch, "meta", module, raising=False)
        torch.get_device_module.cache_clear()

    torch.get_device_module.cache_clear()
    yield put
    torch.get_device_module.cache_clear()


@pytest.fixture
def module(install: Callable[[types.ModuleType], None]) -> StandIn:
    stand_in = StandIn()
    install(stand_in)
    return stand_in


# -- what can be asked before anything starts ------------------------------------------------------------------


@pytest.mark.parametrize("cls", [CPUAccelerator, Fake])
def test_names_agree(cls: type[Accelerator], module: StandIn) -> None:  # ACC-21
    accelerator = cls()
    (device,) = accelerator.get_parallel_devices([0])
    assert device.type == accelerator.device_type
    assert repr(accelerator) == f"{cls.__name__}()"
    assert type(pickle.loads(pickle.dumps(accelerator))) is cls


def test_availability_is_stable_and_starts_nothing(module: StandIn) -> None:  # ACC-01
    assert Fake.availability() == Fake.availability() == Availability(True)
    assert Fake().device_count() == 3
    assert Fake().parse_devices("auto") == (0, 1, 2)
    assert Fake().get_parallel_devices([2, 0]) == [torch.device("meta", 2), torch.device("meta", 0)]  # ACC-05
    assert not module.initialised
    assert CPUAccelerator.availability() == Availability(True)


def test_availability_needs_vendor_import() -> None:  # GEN-05
    """A plugin that computes on the CPU for now is available only if the vendor's import works."""

    class Planned(CPUAccelerator):
        name = "planned"

        @classmethod
        def load(cls) -> None:
            raise OSError("half installed")

    assert Planned.availability() == Availability(False, "OSError: half installed")


@pytest.mark.parametrize(
    "error", [ImportError("no sdk_x"), OSError("libx.so"), AttributeError("y"), RuntimeError(), SystemExit(3)]
)
def test_failed_load_is_a_reason(error: BaseException, module: StandIn) -> None:  # ACC-01
    """A library that fails to load is the reason of the accelerator's absence."""

    class Broken(Fake):
        @classmethod
        def load(cls) -> None:
            raise error

    for _ in range(2):
        availability = Broken.availability()
        assert not availability
        assert type(error).__name__ in availability.reason
        assert str(error) in availability.reason
    assert Broken().device_count() == Broken().auto_device_count() == 0


def test_an_interrupt_is_not_a_reason() -> None:
    class Interrupted(Fake):
        @classmethod
        def load(cls) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted.availability()


def test_missing_hardware(install: Callable[[types.ModuleType], None]) -> None:  # ACC-01, ACC-06, ACC-19
    install(StandIn(0))
    accelerator = Fake()
    assert Fake.availability().reason == "torch reports no usable meta device on this machine"
    assert accelerator.auto_device_count() == 0
    assert accelerator.parse_devices("auto") == ()
    device = torch.device("meta", 0)
    for use in (
        lambda: accelerator.setup_device(device),
        lambda: accelerator.parse_devices(1),
        lambda: accelerator.parse_devices(-1),
        lambda: accelerator.parse_devices([0]),
        Fake.require_available,
    ):
        with pytest.raises(
            AcceleratorUnavailableError, match=r"'fake' can't be used here: torch reports no .*doctor"
        ) as info:
            use()
        assert info.value.alias == "fake"
        assert info.value.reason == Fake.availability().reason
    with pytest.raises(ConfigurationError, match="'devices' must be"):  # nonsense is nonsense everywhere
        accelerator.parse_devices(0)


def test_device_type_without_torch_module(install: Any) -> None:  # ACC-10, ACC-19
    """A device type that torch has no module for is unavailable."""
    assert "meta" in Fake.availability().reason
    with pytest.raises(AcceleratorUnavailableError, match="'fake' can't be used here: RuntimeError"):
        Fake().setup_device(torch.device("meta", 0))
    Fake().teardown()


# -- devices=... -----------------------------------------------------------------------------------------------


class Many(Accelerator):
    name: ClassVar[str] = "many"
    device_type: ClassVar[str] = "meta"

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True)

    def device_count(self) -> int:
        return 8


INDICES = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True)


@given(INDICES)
def test_lists_tuples_and_text_mean_the_same(indices: list[int]) -> None:  # ACC-02, ACC-04, ACC-05
    many, given_list = Many(), list(indices)
    expected = tuple(indices)
    text = ",".join(map(str, indices))
    forms: list[Any] = [given_list, expected, text + ",", f" {text.replace(',', ' , ')},"]
    if len(indices) > 1:
        forms.append(text)
    for form in forms:
        assert many.parse_devices(form) == expected
    assert given_list == indices
    assert many.parse_devices(many.parse_devices(given_list)) == expected
    assert many.get_parallel_devices(expected) == [torch.device("meta", index) for index in indices]


@given(st.integers(1, 8))
def test_counts_are_the_first_ones(count: int) -> None:  # ACC-02
    assert Many().parse_devices(count) == Many().parse_devices(str(count)) == tuple(range(count))


@pytest.mark.parametrize("everything", [-1, "-1", "auto", " auto ", 8, "8", range(8)])
def test_all_of_them(everything: Any) -> None:  # ACC-02, ACC-06
    assert Many().parse_devices(everything) == tuple(range(8))


NONSENSE: list[Any] = [
    -2, 0, "0", "-2", [], (), "", " ", ",", "0,0", [0, 0], True, False, [True], 1.5, 2.0, "1.5", "a", "0,a", [-1],
    "0,-1", [0, 1.0], ["0"], None, {0, 1}, {0: 1}, b"2", "1_0", "+1", "\u0662", "2,,", ",2", "1 2", [None], [[0]],
]  # fmt: skip


@pytest.mark.parametrize("devices", NONSENSE, ids=repr)
@pytest.mark.parametrize("cls", [Many, CPUAccelerator])
def test_nonsense_is_refused(cls: type[Accelerator], devices: Any) -> None:  # ACC-03
    with pytest.raises(ValueError, match=r"'devices' must be 'auto', a count") as info:
        cls().parse_devices(devices)
    assert isinstance(info.value, ConfigurationError)
    assert f"(got {devices!r})" in str(info.value)
    assert repr(cls.name) in str(info.value)


@pytest.mark.parametrize("devices", [9, "9", [8], "0,8", "8,", 10**6, range(9)])
def test_more_than_exist_is_refused(devices: Any) -> None:  # ACC-03
    with pytest.raises(ConfigurationError, match=r"accelerator 'many'.*this process sees 8") as info:
        Many().parse_devices(devices)
    assert f"(got {devices!r})" in str(info.value)


@given(st.one_of(st.integers(), st.text(max_size=6), st.lists(st.integers(-2, 9)), st.floats(), st.booleans()))
def test_parse_devices_property(devices: Any) -> None:
    """Any request of devices gives existing indices or a clear error."""
    try:
        indices = Many().parse_devices(devices)
    except ConfigurationError as error:
        assert repr(devices) in str(error)
    else:
        assert indices
        assert len(set(indices)) == len(indices)
        assert set(indices) <= set(range(8))
        assert all(type(index) is int for index in indices)


def test_processors() -> None:
    cpu, cores = CPUAccelerator(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert cpu.parse_devices("auto") == (0,)
    assert cpu.parse_devices(-1) == tuple(range(cores or 1))
    assert cpu.parse_devices(1000) == tuple(range(1000))
    assert cpu.parse_devices("3,1") == (3, 1)
    assert cpu.get_parallel_devices((3, 1)) == [CPU, CPU]
    assert len(cpu.get_parallel_devices(cpu.parse_devices("auto"))) == cpu.auto_device_count()  # ACC-06


def test_devices_without_index(module: StandIn) -> None:
    class One(Fake):
        indexed: ClassVar[bool] = False

    assert One().get_parallel_devices([0, 1]) == [META, META]


def test_library_loads_before_device() -> None:
    """The vendor's library is loaded before torch is asked for its device type."""
    loaded = []

    class Late(Fake):
        @classmethod
        def load(cls) -> None:
            loaded.append(cls)

    Late().get_parallel_devices([0])
    assert loaded == [Late]


# -- life cycle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [CPUAccelerator, Fake])
def test_another_type_of_device_is_refused(cls: type[Accelerator], module: StandIn) -> None:  # ACC-08
    wrong = META if cls is CPUAccelerator else CPU
    with pytest.raises(ValueError, match=rf"'device' must be of type '{cls.device_type}'.*\(got {wrong}\)"):
        cls().setup_device(wrong)
    assert not module.initialised
    cls().teardown()


def test_set_up_and_teardown(module: StandIn) -> None:  # ACC-08, ACC-10
    accelerator = Fake()
    accelerator.teardown()
    assert not module.initialised  # and nothing was emptied: the stand-in would have objected
    for _ in range(2):
        accelerator.setup_device(torch.device("meta", 2))
        accelerator.setup()
        assert module.current == 2
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        accelerator.setup_device(torch.device("meta", 7))
    accelerator.setup_device(torch.device("meta", 1))
    accelerator.synchronize()
    accelerator.synchronize(META)
    accelerator.synchronize(torch.device("meta", 0))
    accelerator.teardown()
    accelerator.teardown()
    assert module.calls == [
        ("synchronize", 1), ("synchronize", 1), ("synchronize", 0), ("empty_cache", 1), ("empty_cache", 1)
    ]  # fmt: skip


def test_teardown_does_not_hide_the_first_error(
    module: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # ACC-10
    def broken() -> None:
        raise RuntimeError("device-side assertion")

    Fake().setup_device(torch.device("meta", 0))
    monkeypatch.setattr(module, "empty_cache", broken)
    Fake().teardown()
    assert "'fake' could not be emptied: device-side assertion" in caplog.text
    with pytest.raises(RuntimeError, match="device-side assertion"):
        Fake().empty_cache()


def test_teardown_without_hardware_asks_nothing_of_it(install: Callable[[types.ModuleType], None]) -> None:  # ACC-10
    def empty_cache() -> None:
        raise AttributeError("_emptyCache")  # what torch's own modules do in a build without the device

    absent = types.ModuleType("torch.meta")
    vars(absent).update(is_available=lambda: False, empty_cache=empty_cache)
    install(absent)
    Fake().teardown()
    with pytest.raises(AttributeError):
        Fake().empty_cache()


def test_hardware_with_one_device_per_process(install: Callable[[types.ModuleType], None]) -> None:
    """Its module takes no device anywhere, and has only some of the functions."""
    plain = types.ModuleType("torch.meta")
    generator = torch.Generator()
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": lambda: None,
        "manual_seed": generator.manual_seed,
        "get_rng_state": generator.get_state,
        "set_rng_state": generator.set_state,
        "memory_allocated": lambda: 5,
    }
    for name, function in functions.items():
        setattr(plain, name, function)
    install(plain)

    class One(Fake):
        indexed: ClassVar[bool] = False

    accelerator = One()
    accelerator.setup_device(META)
    accelerator.synchronize(META)
    accelerator.manual_seed(3)
    state = accelerator.get_rng_state(META)
    first = torch.rand(4, generator=generator)
    accelerator.set_rng_state(state, META)
    assert torch.equal(first, torch.rand(4, generator=generator))
    assert accelerator.memory_stats(META) == {"allocated": 5}
    accelerator.reset_peak_memory_stats(META)
    accelerator.teardown()


@pytest.mark.usefixtures("accelerator")
def test_random_numbers() -> None:  # ACC-14
    tested, device, outer = hardware.accelerator(), hardware.device(), torch.get_rng_state()
    tested.setup_device(device)

    def draw() -> torch.Tensor:
        return torch.rand(5, device=device)

    tested.manual_seed(7)
    first = draw()
    tested.manual_seed(7)
    assert torch.equal(first, draw())
    state = tested.get_rng_state(device)
    assert (state.dtype, state.device) == (torch.uint8, CPU)
    kept, stream = state.clone(), draw()
    assert torch.equal(state, kept)
    assert not torch.equal(first, stream)
    tested.set_rng_state(state, device)
    assert torch.equal(stream, draw())
    if device.type != "cpu":
        assert torch.equal(torch.get_rng_state(), outer), "the host's numbers are others"
    torch.manual_seed(7)
    assert torch.equal(first, draw())
    torch.set_rng_state(outer)


def test_a_seed_reaches_a_library_that_loads_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when it loads: what is seeded and drawn afterwards is the user's."""
    stand_in = StandIn()
    stand_in._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]

    class Late(Fake):
        @classmethod
        def load(cls) -> None:
            monkeypatch.setattr(torch, "meta", stand_in, raising=False)
            torch.get_device_module.cache_clear()

    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "meta")
    torch.manual_seed(5)
    try:
        assert Late.availability()
        seeds = {generator.initial_seed() for generator in stand_in.generators}
        stand_in.manual_seed_all(123)
        Late().get_parallel_devices([0])
        Late().setup_device(torch.device("meta", 0))
    finally:
        torch.get_device_module.cache_clear()
    assert seeds == {5}
    assert {generator.initial_seed() for generator in stand_in.generators} == {123}


def test_random_numbers_of_each_device(module: StandIn) -> None:  # ACC-14
    accelerator, last = Fake(), torch.device("meta", 2)
    accelerator.setup_device(torch.device("meta", 0))
    accelerator.manual_seed(7)
    draws = [torch.rand(3, generator=generator) for generator in module.generators]
    assert torch.equal(draws[0], draws[2])
    state = accelerator.get_rng_state(last)
    assert (state.dtype, state.device) == (torch.uint8, CPU)
    stream, other = (torch.rand(3, generator=module.generators[index]) for index in (2, 0))
    accelerator.set_rng_state(state, last)
    assert torch.equal(stream, torch.rand(3, generator=module.generators[2]))
    assert not torch.equal(other, torch.rand(3, generator=module.generators[0]))  # went on undisturbed


def test_memory(module: StandIn) -> None:  # ACC-18
    accelerator, device = Fake(), torch.device("meta", 1)
    accelerator.setup_device(torch.device("meta", 0))
    module.allocated[1], module.peak[1] = 10, 30
    assert accelerator.memory_stats(device) == {"allocated": 10, "peak": 30}
    accelerator.reset_peak_memory_stats(device)
    assert accelerator.memory_stats(device) == {"allocated": 10, "peak": 10}
    assert accelerator.memory_stats(torch.device("meta", 0)) == {"allocated": 0, "peak": 0}
    assert CPUAccelerator().memory_stats(CPU) == {}
    CPUAccelerator().reset_peak_memory_stats(CPU)


# -- moving a module --------------------------------------------------------------------------------------------


class Marked(nn.Parameter):
    """A subclass, as layers have them that mark parameters for their optimizer."""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, 3, num_layers=2)
        self.head = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.head.weight
        self.scale = Marked(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.tied(self.head(self.rnn(x)[0])) * self.scale).square().sum()


@pytest.mark.usefixtures("accelerator")
def test_a_moved_module_keeps_its_parameters(caplog: pytest.LogCaptureFixture) -> None:
    device = hardware.device()
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(4, 1, 2)
    expected = copy.deepcopy(model)
    before = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.scale.no_decay = True
    head, calls = model.head.weight, list[str]()

    def double(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(f"gradient on {gradient.device.type}")
        return 2 * gradient

    handle = model.scale.register_hook(double)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(str(parameter is head)))

    for where in (device, CPU, device):
        move_module(model, where)
        after = dict(model.named_parameters(remove_duplicate=False))
        assert after.keys() == before.keys()
        assert all(parameter is before[name] and parameter.device == where for name, parameter in after.items())
        assert model.head.weight is model.tied.weight
        assert all(a is b for a, b in zip(model.rnn._flat_weights, model.rnn.parameters(), strict=True))
        assert type(model.scale) is Marked and model.scale.no_decay
        calls.clear()
        for each in (model, expected):
            each.zero_grad()
            each(x.to(next(each.parameters()).device)).backward()
        assert sorted(calls) == ["True", f"gradient on {where.type}"]
        for name, parameter in expected.named_parameters():
            factor = 2 if name == "scale" else 1
            torch.testing.assert_close(after[name].grad.cpu(), factor * parameter.grad)
    optimizer.step()
    for name, parameter in expected.named_parameters():
        factor = 2 if name == "scale" else 1
        torch.testing.assert_close(before[name].cpu(), parameter - 0.1 * factor * parameter.grad)
    handle.remove()
    calls.clear()
    model(x.to(device)).backward()
    assert calls == ["True"], "a removed hook stays removed"
    assert not caplog.records


@pytest.mark.usefixtures("accelerator")
def test_a_parameter_that_something_holds_on_to(caplog: pytest.LogCaptureFixture) -> None:
    device = hardware.device()
    model, watched = Recurrent(), []
    held = weakref.ref(model.scale), weakref.ref(model.head.weight)
    before = dict(model.named_parameters(remove_duplicate=False))
    model.scale.no_decay = True
    model.scale.register_hook(watched.append)
    move_module(model, device)
    model(torch.randn(4, 1, 2).to(device)).backward()
    assert len(watched) == 1 and type(model.scale) is Marked and model.scale.no_decay
    assert model.head.weight is model.tied.weight
    assert model.rnn.weight_hh_l1 is before["rnn.weight_hh_l1"]
    if model.scale is held[0]():  # as on a device in torch's tree
        assert not caplog.records
    else:
        (record,) = caplog.records
        assert "'scale', 'head.weight' of Recurrent became new parameters" in record.getMessage()


# -- arithmetic on what there is --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("accelerator")
def test_every_declared_dtype_computes(dtype: torch.dtype) -> None:  # ACC-16, ACC-17
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    device = hardware.device()
    x, y = a.to(device, dtype).requires_grad_(), b.to(device, dtype)
    (x @ y).sum().backward()
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 5e-3}.get(dtype, 1e-5)
    torch.testing.assert_close((x @ y).double().cpu(), a @ b, rtol=tolerance, atol=tolerance)
    expected = torch.ones(5, 5).double() @ b.T
    torch.testing.assert_close(x.grad.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", sorted(CPUAccelerator.start_methods))
@pytest.mark.usefixtures("accelerator")
def test_data_workers_after_set_up(method: str) -> None:  # ACC-20
    hardware.accelerator().setup_device(hardware.device())
    torch.ones(1, device=hardware.device())  # in use: a forked worker that keeps to the host works all the same
    workers = {"num_workers": 2 if method == "fork" else 1, "multiprocessing_context": method}
    data = TensorDataset(torch.arange(8.0))
    assert torch.equal(torch.cat([x for (x,) in DataLoader(data, batch_size=3, **workers)]), torch.arange(8.0))


# -- moving batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.usefixtures("accelerator")
def test_tensors_round_trip(dtype: torch.dtype) -> None:  # ACC-12
    """Tensors go to the device and back unchanged."""
    cpu, tested, device = CPUAccelerator(), hardware.accelerator(), hardware.device()
    base = (torch.arange(12).reshape(3, 4) % 7).to(dtype)
    for tensor in (base, base[1, 2], base[:0], base[:, ::2], base.t(), base[:1].expand(5, 4)):
        there = tested.batch_to_device(tensor, device)
        assert tested.batch_to_device(there, device) is there  # no copy
        assert (there.device, there.dtype, there.shape) == (device, dtype, tensor.shape)
        assert torch.equal(cpu.batch_to_device(there, CPU), tensor)
        assert (there is tensor) == (device == CPU)
        moved = tested.batch_to_device(there, META)
        assert (moved.device, moved.dtype, moved.shape) == (META, dtype, tensor.shape)


class Point(NamedTuple):
    x: Any
    y: Any


class Checked(collections.namedtuple("Checked", "x y")):
    """A named tuple whose constructor takes something else."""

    def __new__(cls, both: Any) -> Checked:
        return super().__new__(cls, both, both)


@dataclasses.dataclass
class Record:
    x: Any
    label: str = "cat"
    later: Any = dataclasses.field(init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    doubled: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.x)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


@dataclasses.dataclass
class Edge:
    """Has a field, not a method, of that name."""

    start: Any
    to: Any


class Bag:
    """Moves into a new object; knows none of torch's keywords."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Bag:
        return Bag(self.x.to(device))


class InPlace(Bag):
    def to(self, device: torch.device, non_blocking: bool = False) -> None:  # type: ignore[override]
        self.x = self.x.to(device)


class SelfMoving(dict[str, Any]):
    """A container that keeps a part behind."""

    def to(self, device: torch.device, non_blocking: bool = False) -> SelfMoving:
        return SelfMoving(self, x=self["x"].to(device))


class Attributed(dict[str, Any]):
    note = ""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not this way")


class Tagged(list[Any]):
    note = ""


class View(Mapping[str, Any]):
    """Immutable, over storage of its own."""

    def __init__(self, storage: Mapping[str, Any]) -> None:
        self.storage = dict(storage)

    def __getitem__(self, key: str) -> Any:
        return self.storage[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.storage)

    def __len__(self) -> int:
        return len(self.storage)


class Mutable(View, collections.abc.MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.storage[key] = value

    def __delitem__(self, key: str) -> None:
        del self.storage[key]


def tensor() -> torch.Tensor:
    return torch.ones(2)


def attributed() -> Attributed:
    result = Attributed(x=tensor(), name="n")
    result.note = "kept"
    return result


def tagged() -> Tagged:
    result = Tagged([tensor(), 1])
    result.note = "kept"
    return result


CONTAINERS: dict[str, Any] = {
    "dict": lambda: {"x": tensor(), "n": 3, "none": None},
    "list": lambda: [tensor(), "text", b"bytes", None, 1.5],
    "tuple": lambda: (tensor(), (tensor(), [{"deep": tensor()}])),
    "named tuple": lambda: Point(tensor(), "y"),
    "named tuple with a constructor": lambda: Checked(tensor()),
    "dataclass": lambda: Record(tensor()),
    "frozen dataclass": lambda: Frozen(tensor()),
    "dataclass with slots": lambda: Slotted([tensor()]),
    "dataclass with a field named to": lambda: Edge(tensor(), tensor()),
    "OrderedDict": lambda: collections.OrderedDict(b=tensor(), a=tensor()),
    "defaultdict": lambda: collections.defaultdict(list, x=[tensor()]),
    "UserDict": lambda: collections.UserDict(x=tensor()),
    "dict with attributes": attributed,
    "list with attributes": tagged,
    "immutable mapping": lambda: View({"x": tensor()}),
    "mutable mapping": lambda: Mutable({"x": tensor()}),
    "mapping proxy": lambda: types.MappingProxyType({"x": tensor()}),
    "return type": lambda: torch.max(torch.ones(2, 2), 1),
    "parameter": lambda: [nn.Parameter(tensor())],
}


def tensors_in(item: Any) -> list[torch.Tensor]:
    """Every tensor, found by another way than the code under test."""
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, Mapping):
        return [t for value in item.values() for t in tensors_in(value)]
    if isinstance(item, list | tuple):
        return [t for value in item for t in tensors_in(value)]
    if dataclasses.is_dataclass(item):
        fields = [entry.name for entry in dataclasses.fields(item) if hasattr(item, entry.name)]
        return [t for name in fields for t in tensors_in(getattr(item, name))]
    return []


def shape_of(item: Any) -> Any:
    """Everything but the tensors."""
    if isinstance(item, torch.Tensor):
        return "tensor"
    if isinstance(item, Mapping):
        return type(item), [(key, shape_of(value)) for key, value in item.items()]
    if isinstance(item, list | tuple):
        return type(item), [shape_of(value) for value in item]
    if dataclasses.is_dataclass(item):
        fields = [entry.name for entry in dataclasses.fields(item) if hasattr(item, entry.name)]
        return type(item), [(name, shape_of(getattr(item, name))) for name in fields]
    return item


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_are_rebuilt_as_what_they_were(kind: str) -> None:  # ACC-13
    batch = CONTAINERS[kind]()
    before = shape_of(batch)
    moved = CPUAccelerator().batch_to_device(batch, META)
    assert shape_of(moved) == before
    assert {t.device for t in tensors_in(moved)} == {META}
    assert shape_of(batch) == before  # the user's own batch stays where it was
    assert {t.device for t in tensors_in(batch)} == {CPU}
    assert getattr(moved, "note", None) == getattr(batch, "note", None)
    assert CPUAccelerator().batch_to_device(batch, CPU) is batch


def test_default_factories_and_order_survive() -> None:
    moved = move_to_device(CONTAINERS["defaultdict"](), META)
    assert moved["new"] == []
    assert list(move_to_device(CONTAINERS["OrderedDict"](), META)) == ["b", "a"]


@pytest.mark.parametrize("leaf", [None, "text", b"bytes", 3, 2.5, True, {1, 2}, torch.float32, object(), Bag, range(3)])
def test_what_cannot_move_is_left_alone(leaf: Any) -> None:
    assert move_to_device(leaf, META) is leaf
    assert move_to_device([leaf, tensor()], META)[0] is leaf


def test_objects_that_know_how_to_move() -> None:  # ACC-13
    bag = Bag(tensor())
    moved = move_to_device({"bag": bag}, META)["bag"]
    assert moved is not bag
    assert (moved.x.device, bag.x.device) == (META, CPU)
    in_place = InPlace(tensor())
    assert move_to_device([in_place], META)[0] is in_place
    assert in_place.x.device == META
    own = move_to_device([SelfMoving(x=tensor(), stays=tensor())], META)[0]
    assert type(own) is SelfMoving
    assert (own["x"].device, own["stays"].device) == (META, CPU)


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:  # ACC-13
    packed = nn.utils.rnn.pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    moved = move_to_device({"words": packed}, META)["words"]
    assert type(moved) is type(packed)
    assert (moved.data.device, moved.sorted_indices.device, moved.batch_sizes.device) == (META, META, CPU)


def test_errors_of_own_move_surface() -> None:
    """Errors of a batch's own move to the device are not hidden."""

    class Breaks:
        def to(self, device: torch.device, non_blocking: bool = False) -> Any:
            raise TypeError("cannot move the index")

    with pytest.raises(TypeError, match="cannot move the index"):
        move_to_device([Breaks()], META)


NESTS = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3), st.builds(tensor)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.builds(Point, inner, inner),
        st.builds(Record, inner),
        st.builds(Frozen, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(NESTS)
def test_any_nest_is_mapped_leaf_by_leaf(batch: Any) -> None:
    untouched = copy.deepcopy(shape_of(batch))
    moved = move_to_device(batch, META)
    assert shape_of(moved) == shape_of(batch) == untouched
    assert all(t.device == META for t in tensors_in(moved))
    assert all(t.device == CPU for t in tensors_in(batch))
    assert len(tensors_in(moved)) == len(tensors_in(batch))
    assert map_tensors(batch, lambda leaf: leaf) is batch
