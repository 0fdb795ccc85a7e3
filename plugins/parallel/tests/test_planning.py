"""strategy="auto" by memory on several ranks: what is picked, that it fits, and that it trains the same."""

import copy
import gc
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager, suppress

import memory_models
import pytest
import torch
from memory_models import MODELS, QUIET, planned_run
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal import Trainer
from torchhal.errors import InsufficientMemoryError
from torchhal.trainer.callbacks import ModelCheckpoint

pytestmark = [pytest.mark.timeout(170)]


@pytest.fixture(autouse=True)
def sim():
    pytest.importorskip("torchhal_simulator").load()


def planned(name, devices, limit):
    """Return the decision, the bytes that it predicts, and the peak of this rank."""
    from torchhal.trainer.planning import _choice

    predicted, choose = [], _choice.choose

    def watch(*args):
        choice = choose(*args)
        predicted.append(choice.peak)
        return choice

    from torchhal.trainer.planning import _decision

    _decision.choose = watch
    try:
        decision, peak, _ = planned_run(name, devices, limit)
    finally:
        _decision.choose = choose
    return decision, predicted[-1] if predicted else 0, peak


TWO = [
    ("Deep", 48e6, "ddp"),
    ("Deep", 34e6, "ddp"),
    ("Deep", 22e6, "zero2"),
    ("Deep", 18e6, "zero3"),
    ("Wide", 75e6, "zero2"),
    ("Conv", 18e6, "hybrid"),
    ("Transformer", 75e6, "zero2"),
    ("Embedding", 48e6, "zero2"),
    ("Tied", 50e6, "hybrid"),
]
FOUR = [("Deep", 16e6, "zero2"), ("Transformer", 45e6, "zero3"), ("Wide", 50e6, "zero3")]


def check_fits(world, name, limit, alias):
    found = world.run(planned, name, world.size, int(limit), timeout=150)
    decisions = [decision for decision, _, _ in found]
    assert decisions == [decisions[0]] * world.size, "all ranks follow rank 0"
    predicted, peak = found[0][1], max(peak for _, _, peak in found)
    assert decisions[0]["alias"] == alias, decisions[0]["reason"]
    assert peak <= limit and predicted / 1.15 <= peak <= predicted * 1.15


@pytest.mark.parametrize(("name", "limit", "alias"), TWO[2:3])
def test_the_pick_of_two_ranks_fits(world2, name, limit, alias):
    check_fits(world2, name, limit, alias)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit", "alias"), [*TWO[:2], *TWO[3:]])
def test_picks_of_two_ranks_fit(world2, name, limit, alias):
    check_fits(world2, name, limit, alias)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit", "alias"), FOUR)
def test_picks_of_four_ranks_fit(world4, name, limit, alias):
    check_fits(world4, name, limit, alias)


# -- what is trained --------------------------------------------------------------------------------------------------


def train(name, devices, limit, strategy, only=None, **options):
    """Train an epoch over shared data; return the decision, the losses that were seen, and the weights."""
    import torchhal_simulator
    from torchhal.trainer.planning import _decision

    torchhal_simulator.load()
    gc.collect()
    listed = _decision.strategy_options
    if only is not None:  # as where nothing cheaper can be
        _decision.strategy_options = lambda *given: [each for each in listed(*given) if each.name in only]
    cls = MODELS[name]
    torch.manual_seed(0)
    model = cls()
    data = TensorDataset(*cls.batch(cls.batch_size * devices * 3))
    try:
        with torchhal_simulator.simulate(devices=devices, memory=limit):
            trainer = Trainer(accelerator="sim", strategy=strategy, devices=devices, max_epochs=1, **QUIET, **options)
            trainer.fit(model, DataLoader(data, cls.batch_size, shuffle=True))
    finally:
        _decision.strategy_options = listed
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return trainer._run.auto and trainer._run.auto.decision, trainer.global_step, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit", "only", "batches"),
    [
        ("Transformer", 10**9, None, 1),
        ("Transformer", 75_000_000, None, 1),
        ("Transformer", 60_000_000, ("hybrid (tensor=2)",), 2),
        ("Transformer", 70_000_000, ("hybrid (pipeline=2)",), 2),
        ("Deep", 30_000_000, None, 1),
    ],
)
def test_a_step_takes_the_samples_that_it_takes_by_default(world2, name, limit, only, batches):
    planned = world2.run(train, name, 2, limit, "auto", only, timeout=150)[0]
    default = world2.run(train, name, 2, 10**9, "ddp", timeout=150)[0]
    if planned[0] is not None:
        assert planned[0]["batches"] == batches
    assert planned[1] == default[1] == 3
    for key, value in default[2].items():
        torch.testing.assert_close(planned[2][key], value, rtol=1e-3, atol=1e-4)


def test_what_counts_batches_keeps_candidates_out_that_share_them(world2):
    found = world2.run(reasons, timeout=150)[0]
    assert "counts batches" in found["hybrid (tensor=2)"] and "counts batches" in found["hybrid (pipeline=2)"]


def reasons():
    """Return why candidates can't be, by name, where 'limit_train_batches' is a number."""
    with reasons_of_candidates() as seen:
        train("Transformer", 2, 15_000_000, "auto", limit_train_batches=2)
    return seen


@contextmanager
def reasons_of_candidates():
    """Note why candidates can't be, by name, while one after another is looked at as none fits."""
    from torchhal.trainer.planning import _decision

    seen, candidates = {}, _decision.candidates

    def watched(*given):
        for each in candidates(*given):
            seen[each.name] = each.reason
            yield each

    _decision.candidates = watched
    try:
        with suppress(InsufficientMemoryError):
            yield seen
    finally:
        _decision.candidates = candidates


@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
def test_batch_norms_see_each_batch_once_where_activations_are_recomputed(world2, strategy):
    recomputed, kept = (
        world2.run(statistics, {strategy: options}, timeout=120)[0]
        for options in ({"activation_checkpointing": "blocks"}, {})
    )
    assert recomputed.keys() == kept.keys() and len(kept) == 21
    for name, value in kept.items():
        torch.testing.assert_close(recomputed[name], value)


def statistics(strategy):
    """Return the statistics of Conv's batch norms after an epoch."""
    _, _, weights = train("Conv", 2, 10**9, strategy)
    return {name: value for name, value in weights.items() if "running" in name or "tracked" in name}


class Gathers(MODELS["Deep"]):
    """Communicates where a model may: in its hooks and in its step."""

    def setup(self, stage):
        torch.distributed.barrier()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        total = loss.detach().clone().cpu()
        torch.distributed.all_reduce(total)
        return loss

    trainer = None


def gathering():
    import torchhal_simulator

    torchhal_simulator.load()
    gc.collect()
    model = Gathers()
    with torchhal_simulator.simulate(devices=2, memory=60_000_000), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(accelerator="sim", devices=2, max_steps=2, use_distributed_sampler=False, **QUIET)
        trainer.fit(model, memory_models.loader(model))
    return trainer.global_step, trainer.strategy.alias


def test_a_model_that_communicates_is_not_waited_for(world2):
    assert world2.run(gathering, timeout=90) == [(2, "ddp")] * 2


def test_data_that_the_ranks_divide_themselves_keeps_sharing_candidates_out(world2):
    found = world2.run(reasons_with_a_list, timeout=150)[0]
    assert "not a DataLoader of samples by number" in found["hybrid (tensor=2)"]


def reasons_with_a_list():
    import torchhal_simulator

    torchhal_simulator.load()
    gc.collect()
    model = MODELS["Transformer"]()
    with torchhal_simulator.simulate(devices=2, memory=15_000_000), reasons_of_candidates() as seen:
        Trainer(accelerator="sim", devices=2, max_steps=2, **QUIET).fit(model, memory_models.loader(model))
    return seen


# -- out of memory anyway ---------------------------------------------------------------------------------------------


class Hungry(MODELS["Deep"]):
    """Takes 16 MB more on rank 1 than a fake step can see, until its parameters are sharded."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not isinstance(loss, FakeTensor) and self.trainer.global_rank == 1:
            loss = loss + torch.empty(2**24, dtype=torch.uint8, device=loss.device)[:1].float().sum() * 0
        return loss

    trainer = None


def hungry(by_hand=False):
    import torchhal_simulator

    torchhal_simulator.load()
    torch.manual_seed(0)
    model = Hungry()
    before = copy.deepcopy(model.state_dict())
    with torchhal_simulator.simulate(devices=2, memory=36_000_000), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(accelerator="sim", devices=2, max_steps=2, use_distributed_sampler=False, **QUIET)
        trainer.fit(model, memory_models.loader(model))
    said = [str(each.message) for each in caught if "ran out of memory" in str(each.message)]
    changed = any(not torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
    return trainer._run.auto.decision["name"], said, changed


def test_what_runs_out_of_memory_on_one_rank_gives_way_on_all(world2):
    (first, said, changed), (second, silent, _) = world2.run(hungry, timeout=150)
    assert first == second == "zero2" and changed
    assert silent == [] and said, "rank 0 alone says it"
    assert all(line.count("takes its place") == 1 for line in said) and len(set(said)) == len(said)
    assert said[-1].endswith("strategy 'zero2' takes its place")


class Transposed(MODELS["Deep"]):
    """Has a parameter that only sharding refuses."""

    def __init__(self):
        super().__init__()
        self.layers[3].weight = torch.nn.Parameter(torch.randn(256, 256).t() / 16)


def refused():
    import torchhal_simulator

    torchhal_simulator.load()
    gc.collect()
    torch.manual_seed(0)
    model = Transposed()
    data = TensorDataset(*model.batch(512))
    with torchhal_simulator.simulate(devices=2, memory=22_000_000), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(accelerator="sim", devices=2, max_steps=2, **QUIET)
        trainer.fit(model, DataLoader(data, 64))
    said = [str(each.message) for each in caught if "was chosen, but" in str(each.message)]
    return trainer._run.auto.decision["name"], said, trainer.global_step


def test_what_refuses_the_model_gives_way_too(world2):
    (name, said, steps), (other, _, _) = world2.run(refused, timeout=160)
    assert name == other and name.startswith("hybrid") and steps == 2
    assert said[0].startswith("strategy 'zero2' was chosen, but")
    assert "is not contiguous" in said[0] and said[0].endswith("takes its place")


STOPPED = """
import os, signal, sys, torch, torchhal, memory_models
from torch._subclasses.fake_tensor import FakeTensor

class Stopped(memory_models.Deep):
    trainer = None

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        tried = not isinstance(loss, FakeTensor) and self.trainer._run.is_trial
        if tried and self.trainer.global_rank == 1 and index == 0:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        return loss

data = torch.utils.data.TensorDataset(*Stopped.batch(512))
trainer = torchhal.Trainer(accelerator="sim", devices=2, max_steps=3, logger=False, enable_model_summary=False)
trainer.fit(Stopped(), torch.utils.data.DataLoader(data, 64))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -2)])
def test_a_signal_while_steps_are_tried_stops_all_ranks(tmp_path, name, code):
    (tmp_path / "stopped.py").write_text(STOPPED)
    path = os.pathsep.join([os.path.dirname(memory_models.__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "TORCHHAL_SIM_DEVICES": "2", "TORCHHAL_SIM_MEMORY": "22MiB"}
    done = subprocess.run(
        [sys.executable, "stopped.py", name], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


# -- checkpoints ------------------------------------------------------------------------------------------------------


def keep_and_continue(folder):
    """Plan, save, and continue on devices of about the same memory and of twice as much."""
    import torchhal_simulator

    torchhal_simulator.load()
    found = []
    for limit, ckpt_path in ((22_000_000, None), (22_500_000, "last"), (60_000_000, "last")):
        torch.manual_seed(0)
        model = MODELS["Deep"]()
        with torchhal_simulator.simulate(devices=2, memory=limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator="sim", devices=2, max_steps=2 * len(found) + 2,
                default_root_dir=folder, **{**QUIET, "enable_checkpointing": True},
                callbacks=[ModelCheckpoint(dirpath=f"{folder}/kept", every_n_train_steps=1)],
            )  # fmt: skip
            trainer.fit(model, memory_models.loader(model), ckpt_path=ckpt_path)
        decision = trainer._run.auto.decision
        found.append((decision["name"], decision["limit"], trainer.global_step))
    return found


def test_the_choice_is_kept_in_the_checkpoint_until_the_machine_is_another(world2, tmp_path):
    first, second, third = world2.run(keep_and_continue, str(tmp_path), timeout=160)[0]
    assert first[0] == second[0] == "zero2" and second[1] == 22_000_000, "that of the checkpoint"
    assert third[0] == "ddp" and third[1] == 60_000_000
    assert [steps for _, _, steps in (first, second, third)] == [2, 4, 6]


# -- loops by hand ----------------------------------------------------------------------------------------------------


def by_hand(limit):
    import torchhal_simulator

    torchhal_simulator.load()
    model = MODELS["Deep"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    module = torch.get_device_module("sim")
    with torchhal_simulator.simulate(devices=2, memory=limit):
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        with torchhal.Run(accelerator="sim", devices=2, use_distributed_sampler=False) as run:
            model, optimizer, loader = run.setup(model, optimizer, memory_models.loader(model))
            for inputs, targets in run.batches(loader):
                optimizer.zero_grad()
                run.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
            found = run._strategy.alias, optimizer.param_groups[0]["fused"]
        return *found, module.max_memory_allocated() - before, optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(("limit", "alias", "fused"), [(60e6, "ddp", None), (31e6, "ddp", True), (22e6, "zero2", None)])
def test_a_loop_by_hand(world2, limit, alias, fused):
    for name, during, peak, after in world2.run(by_hand, int(limit), timeout=120):
        assert (name, during) == (alias, fused) and peak <= limit
        assert after is None, "the optimizer is the user's again"
