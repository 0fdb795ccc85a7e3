"""The device's random numbers: seeds, states, generators of one's own."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def module(device):
    return torch.get_device_module(device)


def draws(device, generator=None):
    """One draw by each kind of operator."""
    weights = torch.arange(1.0, 9.0, device=device)
    return [
        torch.rand(8, device=device, generator=generator),
        torch.randn(8, device=device, generator=generator),
        torch.randint(100, (8,), device=device, generator=generator),
        torch.randperm(8, device=device, generator=generator),
        torch.multinomial(weights, 4, generator=generator),
        torch.normal(weights, 2.0, generator=generator),
        torch.bernoulli(weights / 9, generator=generator),
        torch.empty(8, device=device).exponential_(generator=generator),
    ]


def default_draws(device):
    """Draws that can't be given a generator, too."""
    x = torch.ones(64, device=device)
    return [*draws(device), nn.functional.dropout(x), nn.functional.rrelu(-x, training=True), torch.rand_like(x)]


def equal(these, those):
    return [torch.equal(this.cpu(), that.cpu()) for this, that in zip(these, those, strict=True)]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, -3])
def test_one_seed_for_all_devices(seed, device, module):
    torch.manual_seed(seed)
    first = default_draws(device)
    assert module.initial_seed() == torch.initial_seed()
    second = default_draws(device)
    assert not any(equal(first, second))
    torch.manual_seed(seed)
    assert all(equal(first, default_draws(device)))


def test_seed_draws_another(device):
    seeds = {torch.seed(), torch.seed()}
    assert len(seeds) == 2
    assert torch.get_device_module(device).initial_seed() in seeds
    assert torch.get_device_module(device).seed() not in seeds


def test_names_that_were_imported_before_seed_it_too(device):
    from torch.random import manual_seed  # bound long before the device was loaded

    manual_seed(5)
    assert torch.get_device_module(device).initial_seed() == 5


def test_the_cpu_has_a_state_of_its_own(device, module):
    torch.manual_seed(0)
    expected = torch.rand(8)
    torch.manual_seed(0)
    default_draws(device)
    assert torch.equal(torch.rand(8), expected)
    state = module.get_rng_state()
    torch.rand(8)
    nn.functional.dropout(torch.ones(8))
    assert torch.equal(module.get_rng_state(), state)


def test_states(device, module):
    state = module.get_rng_state()
    assert state.device.type == "cpu"
    first = default_draws(device)
    module.set_rng_state(state)
    assert all(equal(first, default_draws(device)))
    module.set_rng_state_all([state, *module.get_rng_state_all()[1:]])
    assert all(equal(first, default_draws(device)))
    with pytest.raises((RuntimeError, TypeError)):
        module.set_rng_state(torch.zeros(3))


def test_each_index_has_its_state(device, second, module):
    module.manual_seed_all(1)
    first = draws(device)
    assert all(equal(first, draws(second)))
    with module.device(second):
        module.manual_seed(2)
    assert module.initial_seed() == 1
    assert not any(equal(draws(device), draws(second)))


def test_fork_rng(device, module):
    with torch.random.fork_rng():
        first = default_draws(device)
    assert all(equal(first, default_draws(device)))
    with torch.random.fork_rng(devices=[0], device_type=device.type):
        first = default_draws(device)
    assert all(equal(first, default_draws(device)))
    with torch.random.fork_rng(enabled=False):
        first = default_draws(device)
    assert not any(equal(first, default_draws(device)))


def test_generators(device):
    generator = torch.Generator(device).manual_seed(3)
    assert generator.device == device
    first = draws(device, generator)
    assert all(equal(first, draws(device, generator.manual_seed(3))))
    state = generator.get_state()
    again = draws(device, generator)
    assert not any(equal(first, again))
    generator.set_state(state)
    for copied in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator)), generator.clone_state()):
        assert copied.device == device
        assert all(equal(again, draws(device, copied)))
    assert all(equal(again, draws(device, generator)))


def test_a_generator_leaves_the_default_alone(device, module):
    state = module.get_rng_state()
    draws(device, torch.Generator(device))
    assert torch.equal(module.get_rng_state(), state)
    assert torch.Generator(device).initial_seed() == torch.Generator().initial_seed()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_dropout(use_reentrant, device):
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)).to(device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.manual_seed(0)
    y = checkpoint(model, x, use_reentrant=use_reentrant)
    after = torch.rand(4, device=device)
    y.sum().backward()
    assert torch.equal(x.grad, expected)
    torch.manual_seed(0)
    model(x)
    assert torch.equal(torch.rand(4, device=device), after)


def test_checkpointing_on_two_devices_repeats_the_dropouts(device, second):
    """One backward recomputes on both, each in autograd's thread for that device."""

    def masked(x):
        return nn.functional.dropout(x, 0.5)

    parts = [torch.ones(100_000, device=place, requires_grad=True) for place in (device, second)]
    for _ in range(30):
        outputs = [checkpoint(masked, part, use_reentrant=False) for part in parts]
        expected = [output.detach().clone() for output in outputs]
        gradients = torch.autograd.grad(outputs, parts, [torch.ones_like(output) for output in outputs])
        assert all(equal(gradients, expected))


def test_an_operator_without_a_generator_draws_undisturbed_on_two_devices(device, second, module):
    library = torch.library.Library("simulator_tests", "FRAGMENT")
    library.define("noise(Tensor like) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    library.impl("noise", torch.rand_like, "CPU")
    state = torch.get_rng_state()

    def draw(place):
        like = torch.empty(200_000, device=place)
        return [torch.ops.simulator_tests.noise(like).cpu() for _ in range(20)]

    module.manual_seed_all(3)
    alone = [draw(device), draw(second)]
    module.manual_seed_all(3)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(draw, (device, second)))
    for mine, expected in zip(together, alone, strict=True):
        assert all(equal(mine, expected))
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_draws_what_the_cpu_does(device):
    for p in (0.0, 0.3, 1.0):
        for x in (torch.randn(64), torch.randn(0), torch.randn(4, 5).to(torch.bfloat16)):
            torch.manual_seed(1)
            expected = torch.native_dropout(x, p, True)
            torch.manual_seed(1)
            assert all(equal(torch.native_dropout(x.to(device), p, True), expected))
    assert all(equal(torch.native_dropout(x.to(device), 0.5, False), torch.native_dropout(x, 0.5, False)))


def test_all_bits_of_a_seed_count(device):
    first = [torch.rand(8, generator=torch.Generator(device).manual_seed(seed), device=device).cpu()
             for seed in (1, 2**32 + 1, 2**33 + 1, 2**63 + 1)]  # fmt: skip
    assert torch.equal(first[0], torch.rand(8, generator=torch.Generator().manual_seed(1)))
    for index, one in enumerate(first):
        assert not any(equal(first[index + 1 :], [one] * (3 - index)))
