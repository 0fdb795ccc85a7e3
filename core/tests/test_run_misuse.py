"""A loop of a user's own that uses torchhal.Run wrongly: what it says, and that nothing is lost silently."""

import warnings

import pytest
import torch
from run_loops import data, net
from torch import nn
from torch.utils.data import DataLoader

import torchhal
from torchhal.errors import CheckpointMismatchError, ConfigurationError, ModelError


@pytest.fixture
def make(tmp_path):
    """Make runs in a folder of the test, and end those that it leaves."""
    runs = []

    def run(**options):
        runs.append(torchhal.Run(**{"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, **options}))
        return runs[-1]

    yield run
    for each in runs:
        each.end()


def begin(make, *others, ckpt_path=None, named=None, **options):
    """Set up a model, its optimizer and a loader; the run and these three."""
    model, loader = net(), DataLoader(data(), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = make(**options)
    run.setup(model, optimizer, loader, *others, ckpt_path=ckpt_path, **(named or {}))
    return run, model, optimizer, loader


def step(run, model, optimizer, batch):
    optimizer.zero_grad()
    run.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
    optimizer.step()


class Counter:
    """An object with a state."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Refusing(Counter):
    def load_state_dict(self, state):
        self.count = state["decay"]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda run, model, optimizer: run.clip_gradients(model, 1.0), "takes the optimizer .* not Net"),
        (lambda run, model, optimizer: run.clip_gradients(1.0, optimizer), "takes the optimizer .* not float"),
        (lambda run, model, optimizer: run.clip_gradients(optimizer, -1.0), r"'max_norm' must be .* \(got -1.0\)"),
        (lambda run, model, optimizer: run.clip_gradients(optimizer, float("nan")), r"'max_norm' must be .*got nan"),
        (lambda run, model, optimizer: run.clip_gradients(optimizer, "1"), r"'max_norm' must be .*got '1'"),
        (lambda run, model, optimizer: run.clip_gradients(optimizer, 1.0, "l2"), r"'algorithm' must be .*got 'l2'"),
        (lambda run, model, optimizer: run.forward_backward(None, 1), r"forward_backward takes a function .*got None"),
        (lambda run, model, optimizer: run.forward(model(torch.ones(1, 8)), 1), "forward takes a function"),
        (lambda run, model, optimizer: run.log(3.0), r"log takes a dict .*got 3.0.: run.log"),
        (lambda run, model, optimizer: run.log({"a": torch.tensor(1j)}), "log takes names and numbers"),
        (lambda run, model, optimizer: run.log({"a": 1.0}, step="x"), r"'step' must be .*got 'x'"),
        (lambda run, model, optimizer: list(run.batches(None)), r"'loader' must be an iterable .*got None"),
        (lambda run, model, optimizer: list(run.batches([[1], [2]].__len__)), "'loader' must be an iterable"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_the_name_of_the_argument(make, call, says):
    run, model, optimizer, _ = begin(make)
    with pytest.raises((ConfigurationError, ModelError), match=says):
        call(run, model, optimizer)


def test_an_infinite_norm_gives_the_norm(make):
    run, model, optimizer, loader = begin(make)
    inputs, targets = next(iter(loader))
    run.backward(nn.functional.mse_loss(model(inputs), targets))
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = run.clip_gradients(optimizer, float("inf"))
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before])))
    assert all(torch.equal(grad, parameter.grad) for grad, parameter in zip(before, model.parameters(), strict=True))


def test_forward_backward_within_another_is_refused(make):
    run, model, _, _ = begin(make)
    with pytest.raises(ConfigurationError, match="inside of"):
        run.forward_backward(
            lambda batch: run.forward_backward(lambda part: model(part).mean(), batch), torch.ones(1, 8)
        )


@pytest.mark.parametrize("clips", [False, True])
def test_a_clip_value_that_the_loop_has_to_apply_is_warned_of(make, clips):
    run, model, optimizer, loader = begin(make, gradient_clip_val=0.5)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for inputs, targets in run.batches(loader):
            optimizer.zero_grad()
            run.backward(nn.functional.mse_loss(model(inputs), targets))
            if clips:
                run.clip_gradients(optimizer, 0.5)
            optimizer.step()
    said = [str(each.message) for each in seen if "gradient_clip_val=0.5 clips nothing" in str(each.message)]
    assert len(said) == (0 if clips else 1)


# -- loaders -----------------------------------------------------------------------------------------------------------


def test_several_loaders_are_not_one(make):
    loader = DataLoader(data(), batch_size=8)
    run, *_ = begin(make)
    for batches in (run.batches, run.evaluation_batches):
        with pytest.raises(ModelError, match=r"'loader' must be one iterable of batches \(got a list of 2 loader"):
            list(batches([loader, loader]))
    with pytest.raises(ModelError, match=r"'loader' must be one iterable of batches"):
        model = net()
        make().setup(model, torch.optim.SGD(model.parameters(), lr=0.1), [loader, loader])


@pytest.mark.parametrize("empty", [list, lambda: DataLoader([], batch_size=2), lambda: iter([])])
def test_an_evaluation_without_a_batch_is_refused(make, empty):
    run, *_ = begin(make)
    with pytest.raises(ModelError, match="the loader of evaluation_batches gave no batch"):
        list(run.evaluation_batches(empty()))
    assert len(list(run.evaluation_batches([torch.ones(2, 8)]))) == 1


class Flaky(torch.utils.data.Dataset):
    """Data whose first reading breaks off."""

    broken = True

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2 and self.broken:
            raise OSError("no such share")
        return torch.ones(8)


@pytest.mark.parametrize("name", ["batches", "evaluation_batches"])
def test_a_loop_goes_on_after_an_error_of_its_loader(make, name):
    dataset = Flaky()
    model, loader = net(), DataLoader(dataset, batch_size=1)
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with pytest.raises(OSError, match="no such share"):
        list(getattr(run, name)(loader))
    dataset.broken = False
    assert len(list(getattr(run, name)(loader))) == 4
    assert run.current_epoch == (2 if name == "batches" else 0)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batches", "evaluation_batches"])
@pytest.mark.parametrize("by", ["end", "setup"])
def test_a_run_that_ends_in_the_body_of_a_batch_says_so_at_the_next(make, name, by):
    run, _, _, loader = begin(make)
    taken = 0
    with pytest.raises(ConfigurationError, match="this Run has ended in the body of a batch"):
        for _ in getattr(run, name)(loader):
            taken += 1
            if by == "end":
                run.end()
            else:
                begin(make)
    assert taken == 1


def test_a_run_that_ends_within_accumulate_ends(make):
    run, *_ = begin(make, accumulate_grad_batches=2)
    with run.accumulate():
        run.end()
    with pytest.raises(ConfigurationError, match="has ended"):
        run.barrier()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(make, path, *others, named=None):
    run, model, optimizer, loader = begin(make, *others, named=named)
    for batch in run.batches(loader):
        step(run, model, optimizer, batch)
    run.save_checkpoint(path)
    run.end()
    return path


def test_a_new_object_begins_as_it_is_with_a_warning(make, tmp_path):
    path = saved(make, tmp_path / "without.ckpt")
    counter = Counter(5)
    with pytest.warns(UserWarning, match="has no state of 'average'"):
        run, *_ = begin(make, named={"average": counter}, ckpt_path=path)
    assert counter.count == 5 and run.global_step == 5


def test_an_object_of_another_name_is_refused(make, tmp_path):
    path = saved(make, tmp_path / "named.ckpt", named={"ema": Counter(3)})
    with pytest.raises(CheckpointMismatchError, match=r"holds the state of 'ema', and setup got 'average' instead"):
        begin(make, named={"average": Counter()}, ckpt_path=path)


def test_an_object_that_refuses_its_state_is_named(make, tmp_path):
    path = saved(make, tmp_path / "named.ckpt", named={"ema": Counter(3)})
    with pytest.raises(CheckpointMismatchError, match=r"'ema', the Refusing that setup got, .*KeyError: 'decay'"):
        begin(make, named={"ema": Refusing()}, ckpt_path=path)


def test_inference_continues_the_other_objects_too(make, tmp_path):
    path = saved(make, tmp_path / "named.ckpt", named={"ema": Counter(3)})
    counter = Counter()
    make().setup(net(), ema=counter, ckpt_path=path)
    assert counter.count == 3


def test_another_optimizer_is_refused_in_the_words_of_a_run(make, tmp_path):
    path = saved(make, tmp_path / "sgd.ckpt")
    model = net()
    with pytest.raises(CheckpointMismatchError, match=r"the optimizer.s. SGD, but setup got AdamW: give those again"):
        make().setup(model, torch.optim.AdamW(model.parameters()), ckpt_path=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(CheckpointMismatchError, match=r"of 0 lr_scheduler.* but setup got 1"):
        make().setup(model, optimizer, scheduler, ckpt_path=path)


def test_best_is_the_trainers(make):
    with pytest.raises(ConfigurationError, match="ckpt_path='best' is the Trainer's"):
        begin(make, ckpt_path="best")
