"""A loop of a user's own, by torchhal.Run, in one process: numbers, positions, checkpoints, and what it refuses."""

import copy
import gc
import inspect
import pickle
import signal
import weakref

import pytest
import run_loops
import torch
from quiet_trainer import QUIET
from run_loops import Net, data, net
from torch import nn
from torch.utils.data import DataLoader

import torchhal
from torchhal import Trainer
from torchhal.errors import ConfigurationError, LaunchError, ModelError
from torchhal.strategies import SingleDeviceStrategy


@pytest.fixture
def make(tmp_path):
    """Make runs in a folder of the test, and end those that it leaves."""
    runs = []

    def run(**options):
        options = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, **options}
        runs.append(torchhal.Run(**options))
        return runs[-1]

    yield run
    for each in runs:
        each.end()


def loop(make, steps=None, *, seed=0, dropout=False, ckpt_path=None, save_at=None, epochs=2, **options):
    """Train with shuffled data; the losses, and the run."""
    torch.manual_seed(seed)
    model = nn.Sequential(Net(4), nn.Dropout(0.2 if dropout else 0.0), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    run = make(**options)
    run.setup(model, optimizer, scheduler, loader, ckpt_path=ckpt_path)
    losses = []
    for _ in range(run.current_epoch, epochs):
        for inputs, targets in run.batches(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            run.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if run.global_step == save_at:
                run.save_checkpoint()
            if len(losses) == steps:
                run.end()
                return losses, run
    run.end()
    return losses, run


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_a_loop_is_the_plain_one(make, accumulate, whole):
    run = run_loops.ByRun(accelerator="cpu", devices=1, accumulate_grad_batches=accumulate)
    found = run_loops.regression(run, run_loops.BATCH, whole)
    run_loops.same(found, run_loops.by_plain("regression", accumulate, whole=whole), tolerance=1e-7)


@pytest.mark.parametrize("name", ["gan", "distillation"])
def test_several_models_are_those_of_the_plain_loop(name):
    found = run_loops.LOOPS[name](run_loops.ByRun(accelerator="cpu", devices=1), run_loops.BATCH)
    run_loops.same(found, run_loops.by_plain(name), tolerance=1e-7)


def test_the_forward_is_in_the_precision_of_the_run_and_its_output_is_wide(make):
    model = net()
    seen = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run = make(precision="bf16-mixed")
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    output = model(x=torch.randn(2, 8), scale=2.0)
    assert (seen, output.dtype) == ([torch.bfloat16], torch.float32)
    inside = run.forward(lambda batch: model.head(batch) @ torch.ones(1, 4), torch.randn(2, 8))
    assert (seen[-1], inside.dtype) == (torch.bfloat16, torch.float32)


def test_an_optimizer_with_a_closure_is_that_of_the_plain_loop(make):
    def train(run, model):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        loader = DataLoader(data(), batch_size=20)
        run.setup(model, optimizer, loader)
        values = []
        for inputs, targets in run.batches(loader):

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)  # noqa: B023
                run.backward(loss)
                return loss

            values.append(float(optimizer.step(closure).detach()))
        return values

    assert train(make(), net()) == pytest.approx(train(run_loops.Plain(), net()), abs=1e-7)


def test_a_scheduler_steps_with_the_optimizer_and_not_within_an_accumulation(make):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(data(), batch_size=8)
    run = make(accumulate_grad_batches=2)
    run.setup(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)  # made behind setup: steps as told
    assert optimizer.param_groups[0]["lr"] == 1.0
    taken = []
    for inputs, targets in run.batches(loader):
        run.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        taken.append((run.is_optimizer_step, run.global_step))
    assert taken == [(False, 0), (True, 1), (False, 1), (True, 2), (True, 3)]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


# -- objects -----------------------------------------------------------------------------------------------------------


def test_setup_returns_the_objects_that_it_got(make):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = make().setup(optimizer, model=model)
    assert [each is one for each, one in zip(found, (optimizer, model), strict=True)] == [True] * 2
    alone = net()
    assert make().setup(alone) is alone


def test_loader_that_setup_returns_hands_out_the_runs_batches(make):
    model, run = net(), make(accumulate_grad_batches=2)
    given = DataLoader(data(20), batch_size=8)
    _, loader = run.setup(torch.optim.SGD(model.parameters(), lr=0.1), given, model=model)[:2]
    assert [run.is_optimizer_step for _ in loader] == [False, True, True]
    assert (len(loader), loader.dataset, run.current_epoch) == (3, given.dataset, 1)
    assert [run.is_optimizer_step for _ in run.batches(loader)] == [False, True, True]
    assert run.current_epoch == 2
    run.end()
    assert len(list(loader)) == 3


@pytest.mark.parametrize(
    ("training", "gradients", "counted"),
    [(True, True, [False, True]), (False, True, [True, True]), (True, False, [True, True])],
)
def test_second_loader_evaluates_while_no_model_can_train(make, training, gradients, counted):
    model, run = net(), make(accumulate_grad_batches=2)
    loaders = DataLoader(data(8), batch_size=8), DataLoader(data(16), batch_size=8)
    *_, second = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)
    model.train(training)
    with torch.set_grad_enabled(gradients):
        assert [run.is_optimizer_step for _ in second] == counted


def test_loader_of_inference_evaluates(make):
    model, run = net(), make()
    model, loader = run.setup(model, DataLoader(data(11), batch_size=4))
    assert [len(x) for x, _ in loader] == [4, 4, 3]


def test_a_model_in_a_run_keeps_its_signature_and_copies_are_models_of_their_own(make):
    model = net()
    make(precision="bf16-mixed").setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "forward" in vars(model)
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    x = torch.randn(2, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.head.bias += 1
            assert torch.allclose(other(x), model(x) + 1, atol=0.05)
            assert not torch.equal(other(x), model(x) + 1)  # a copy computes in its own dtype


def test_hooks_on_a_model_run_once_per_call(make):
    model, calls = net(), []
    model.register_forward_hook(lambda *args: calls.append(1))
    make(precision="bf16-mixed").setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "forward" in vars(model)
    model(torch.randn(2, 8))
    assert calls == [1]


def test_after_the_end_everything_is_as_before(make):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make(precision="bf16-mixed")
    run.setup(model, optimizer)
    assert "forward" in vars(model) and "step" in vars(optimizer)
    run.end()
    run.end()
    assert not {"forward", "training_step", "validation_step"} & set(vars(model))
    assert not {"step", "zero_grad"} & set(vars(optimizer))
    with pytest.raises(ConfigurationError, match="has ended"):
        run.backward(model(torch.randn(2, 8)).sum())


def test_a_step_of_the_models_own_is_there_again_after_the_run(make):
    class Own(Net):
        def training_step(self, batch, batch_idx):
            return self(batch).mean()

    model = Own()
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert float(run.forward_backward(lambda batch: model(batch).sum() * 0, torch.randn(2, 8))) == 0
    run.end()
    assert model.training_step(torch.randn(2, 8), 0).item() != 0


def test_a_scheduler_made_in_a_run_leaves_the_optimizer_to_itself_after_it(make):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make()
    run.setup(model, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run.end()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert run.global_step == 0


def test_the_loader_that_setup_returns_keeps_nothing_else(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torchhal.Run(accelerator="cpu", devices=1, default_root_dir=tmp_path)
    *_, loader = run.setup(model, optimizer, DataLoader(data(), batch_size=8))
    for inputs, _ in loader:
        run.backward(model(inputs).sum())
        optimizer.step()
    run.end()
    kept = weakref.ref(model)
    del model, optimizer, run
    gc.collect()
    assert kept() is None
    assert len(list(loader)) == 5


def test_a_set_up_that_fails_leaves_the_objects_alone(make):
    class Half:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self): ...

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="needs state_dict"):
        make().setup(model, optimizer, Half(optimizer))
    assert "step" not in vars(optimizer)


def test_the_loader_of_an_earlier_run_is_the_main_one_of_the_next(make):
    model, loader = net(), DataLoader(data(), batch_size=8)
    for _ in range(2):  # as a notebook's cell that is run again
        run = make()
        model, _, loader = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for _ in loader:
            pass
        assert run.current_epoch == 1
        run.end()


def test_a_loader_that_is_made_for_each_epoch_is_the_main_one(make):
    model = net()
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in range(3):
        assert run.current_epoch == epoch
        assert len(list(run.batches(DataLoader(data(), batch_size=8)))) == 5


# -- positions and checkpoints -----------------------------------------------------------------------------------------


def test_a_run_continues_within_an_epoch_exactly(make):
    whole, _ = loop(make, dropout=True)
    first, _ = loop(make, 7, dropout=True, save_at=7)
    rest, run = loop(make, dropout=True, seed=9, ckpt_path="last")
    assert first + rest == whole
    assert run.current_epoch == 2


def test_break_ends_an_epoch(make):
    model, loader = net(), DataLoader(data(), batch_size=8)
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in run.batches(loader):
        break
    assert run.current_epoch == 1
    assert len(list(run.batches(loader))) == 5
    assert run.current_epoch == 2


def test_a_second_loader_has_no_part_in_the_position(make):
    model, loader, other = net(), DataLoader(data(), batch_size=8), DataLoader(data(6), batch_size=2)
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    seen = [len(list(run.batches(other))) for _ in run.batches(loader)]
    assert seen == [3] * 5
    assert (run.current_epoch, len(list(run.batches(other)))) == (1, 3)


def test_an_epoch_within_an_epoch_of_the_same_loader_is_refused(make):
    model, loader = net(), DataLoader(data(), batch_size=8)
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with pytest.raises(ModelError, match="under way"):
        for _ in run.batches(loader):
            for _ in run.batches(loader):
                pass


class Fitted(Net):
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fitted(seed=0):
    torch.manual_seed(seed)
    return Fitted()


def by_run(make, steps, path=None, save=None):
    model = fitted()
    optimizer, loader = model.configure_optimizers(), DataLoader(data(), batch_size=8, shuffle=True)
    run = make()
    run.setup(model, optimizer, loader, ckpt_path=path)
    for _ in range(10):
        for batch in run.batches(loader):
            if run.global_step == steps:
                run.end()
                return model.state_dict()
            optimizer.zero_grad()
            run.backward(model.training_step(batch, 0))
            optimizer.step()
            if run.global_step == steps and save is not None:
                run.save_checkpoint(save)
                run.end()
                return model.state_dict()
    raise AssertionError


def by_trainer(steps, path=None, save=None):
    model = fitted()
    trainer = Trainer(**QUIET, accelerator="cpu", devices=1, max_steps=steps)
    trainer.fit(model, DataLoader(data(), batch_size=8, shuffle=True), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.state_dict()


@pytest.mark.parametrize("saver", ["run", "trainer"])
def test_a_trainer_continues_a_runs_file_and_the_reverse(make, tmp_path, saver):
    path = str(tmp_path / "saved.ckpt")
    whole = by_trainer(12)
    if saver == "run":
        by_run(make, 7, save=path)
        found = by_trainer(12, path)
    else:
        by_trainer(7, save=path)
        found = by_run(make, 12, path)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


def test_a_named_model_and_other_objects_are_in_the_checkpoint_by_their_names(make, tmp_path):
    class Counter:
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    path = tmp_path / "named.ckpt"
    for ckpt_path in (None, path):
        model, counter = net(), Counter()
        run = make()
        run.setup(torch.optim.SGD(model.parameters(), lr=0.1), model=model, seen=counter, ckpt_path=ckpt_path)
        if ckpt_path is None:
            counter.count = 3
            run.save_checkpoint(path)
            run.end()
    assert counter.count == 3
    assert "model.head.weight" in torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize("inside", ["another loader", "an evaluation"])
def test_a_stop_waits_for_the_end_of_the_batch_in_hand(make, inside):
    """Its checkpoint counts the batch as used, so the body has to come to its end."""
    model, loader, other = net(), DataLoader(data(), batch_size=8), DataLoader(data(6), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make()
    run.setup(model, optimizer, loader)
    steps = 0
    with pytest.raises(SystemExit) as exit:
        for inputs, _ in run.batches(loader):
            if steps == 1:
                signal.raise_signal(signal.SIGTERM)
            for _ in run.batches(other) if inside == "another loader" else run.evaluation_batches(other):
                pass
            run.backward(model(inputs).sum())
            optimizer.step()
            steps += 1
    assert (exit.value.code, steps, run.global_step) == (143, 2, 2)


def test_an_accumulation_that_break_leaves_is_no_part_of_the_next_epoch(make):
    model = nn.Linear(1, 1)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(torch.ones(8, 1), batch_size=1)
    run = make(accumulate_grad_batches=4)
    run.setup(model, optimizer, loader)
    gradients = []
    for epoch in range(2):
        for index, inputs in enumerate(run.batches(loader)):
            optimizer.zero_grad()
            run.backward(model(inputs).sum())
            if run.is_optimizer_step:
                gradients.append(model.weight.grad.item())
            optimizer.step()
            if epoch == 0 and index == 2:
                break
        if epoch == 0:
            with pytest.warns(UserWarning, match="within an accumulation"):
                run.save_checkpoint()
    assert gradients == [1.0, 1.0]


def test_an_accumulation_needs_batches_that_are_counted(make):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make(accumulate_grad_batches=2)
    run.setup(model, optimizer)
    with pytest.raises(ConfigurationError, match=r"run\.accumulate"):
        run.backward(model(torch.ones(2, 8)).sum())
    taken = []
    for _ in range(4):
        with run.accumulate():
            run.backward(model(torch.ones(2, 8)).sum())
            optimizer.step()
        taken.append(run.global_step)
    assert taken == [0, 1, 1, 2]


def test_two_optimizers_of_one_module_accumulate_on_no_resume(make, tmp_path):
    """The samples of a step are kept by accumulation where one optimizer steps; two step when the loop says so."""
    path = tmp_path / "saved.ckpt"
    for batch_size in (8, 4):  # as two ranks would share it
        model, loader = net(), DataLoader(data(), batch_size=4)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.blocks, model.head)]
        run = make()
        run.setup(model, *optimizers, loader, ckpt_path=path if batch_size == 4 else None)
        if batch_size == 8:
            run._state.progress.step_size = 8
            run.save_checkpoint(path)
            run.end()
    assert [run.is_optimizer_step for _ in run.batches(loader)] == [True] * 10


# -- evaluation and values ---------------------------------------------------------------------------------------------


def test_an_evaluation_sees_each_sample_once_and_needs_no_optimizer(make):
    model = net()
    run = make()
    run.setup(model)
    with torch.no_grad():
        found = [run.gather((model(x), len(x))) for x, _ in run.evaluation_batches(DataLoader(data(11), batch_size=4))]
        expected = model(data(11).tensors[0])
    assert torch.allclose(torch.cat([output for output, _ in found]), expected, atol=1e-6)
    assert [count.tolist() for _, count in found] == [[4], [4], [3]]
    with pytest.raises(ConfigurationError, match="setup got no optimizer"):
        run.backward(model(torch.randn(2, 8)).sum())


def test_metrics_go_to_the_loggers_at_their_interval(make, tmp_path):
    model, loader = net(), DataLoader(data(), batch_size=8)
    run = make(logger="csv", log_every_n_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.setup(model, optimizer, loader)
    for inputs, _ in run.batches(loader):
        run.backward(model(inputs).mean())
        optimizer.step()
        run.log({"loss": torch.tensor(float(run.global_step))})
    run.log({"accuracy": 0.5})
    run.end()
    (file,) = tmp_path.rglob("metrics.csv")
    lines = file.read_text().splitlines()
    assert len(lines) == 4 and "accuracy" in lines[0] and "loss" in lines[0]


def test_an_evaluation_that_is_left_ends_for_the_strategy(make):
    class Notes(SingleDeviceStrategy):
        seen = ""

        def on_train_epoch_start(self):
            self.seen += "("

        def on_train_epoch_end(self):
            self.seen += ")"

        def on_evaluation_start(self, stage):
            self.seen += "["

        def on_evaluation_end(self, stage):
            self.seen += "]"

    model, loader, strategy = net(), DataLoader(data(), batch_size=20), Notes()
    run = make(strategy=strategy)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in run.batches(loader):
        for _ in run.evaluation_batches(loader):
            break
    for _ in run.evaluation_batches(loader):
        break
    for _ in run.batches(loader):
        break
    run.end()
    assert strategy.seen == "([][])[]()"


def test_a_folder_that_cannot_be_written_to_stops_no_loop(make, tmp_path):
    (tmp_path / "file").touch()
    model = net()
    run = make(default_root_dir=tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="can't be written to"):
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.save_checkpoint(tmp_path / "here.ckpt")
    with pytest.raises(torchhal.errors.CheckpointError):
        run.save_checkpoint()


def test_an_evaluation_that_is_kept_does_not_stop_the_training(make):
    model, loader = net(), DataLoader(data(), batch_size=8)
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    kept = iter(run.evaluation_batches(loader))
    next(kept)
    with pytest.raises(ConfigurationError, match="under way"):
        next(iter(run.evaluation_batches(loader)))
    for batch in run.batches(loader):
        run.forward_backward(lambda batch: model(batch[0]).mean(), batch)
    assert kept is not None


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objects", "says"),
    [
        (lambda: (), "needs a model"),
        (lambda: (net(), 3), "argument 2 is 3"),
        (lambda: (net(), torch.optim.SGD(net().parameters(), lr=0.1)), "parameter.s. of no model"),
        (lambda: [net()] * 2, "twice"),
        (lambda: ((model := net()), [torch.optim.SGD(model.parameters(), lr=0.1)]), "one by one"),
    ],
)
def test_what_setup_cannot_use_is_refused(make, objects, says):
    with pytest.raises((ConfigurationError, ModelError), match=says):
        make().setup(*objects())


def test_a_second_setup_is_refused(make):
    run = make()
    with pytest.raises(ConfigurationError, match="not set up"):
        run.batches([])
    run.setup(net())
    with pytest.raises(ConfigurationError, match="set up already"):
        run.setup(net())


@pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True) * 1, torch.ones(()), 1.0])
def test_what_is_no_loss_is_refused(make, loss):
    model = net()
    run = make()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ModelError, match="backward takes"):
        run.backward(loss)


def test_workers_need_a_function(make):
    run = make(strategy="ddp_spawn", devices=2)
    model = net()
    with pytest.raises(LaunchError, match=r"run\.launch"):
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


class StepsItself(SingleDeviceStrategy):
    def module_step(self, name):
        return self.counted(super().module_step(name))

    def counted(self, step):
        def call(*args):
            self.steps = getattr(self, "steps", 0) + 1
            return step(*args)

        return call


class NeedsTrainer(SingleDeviceStrategy):
    needs_trainer = "counts the epochs of the Trainer"


def test_a_strategy_with_steps_of_its_own_trains_by_functions_alone(make):
    model = net()
    run = make(strategy=StepsItself())
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="forward_backward"):
        model(torch.randn(2, 8))
    assert run.forward_backward(lambda batch: model(batch).mean(), torch.randn(2, 8)).dim() == 0
    with pytest.raises(ConfigurationError, match="counts the epochs of the Trainer"):
        make(strategy=NeedsTrainer()).setup(net())


def test_several_optimizers_do_not_accumulate(make):
    first, second = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches"):
        make(accumulate_grad_batches=2).setup(first, second, *optimizers)


def test_an_error_in_the_loop_gives_everything_back(make):
    model = net()
    with pytest.raises(ZeroDivisionError), make(precision="bf16-mixed") as run:
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert "forward" in vars(model)
        _ = 1 / 0
    assert "forward" not in vars(model)
