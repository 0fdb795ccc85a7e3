"""Test that what each rank of a strategy or a precision has of its own is part of a checkpoint."""

import copy
import json
import re

import pytest
import torch
from ddp_models import SaveAt

from torchhal import Module, Trainer
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.checkpoint._consolidate import consolidate
from torchhal.cli import main
from torchhal.errors import CheckpointCorruptError, CheckpointMismatchError
from torchhal.precision import Precision
from torchhal.strategies import DDPStrategy
from torchhal.trainer._checkpoint_fields import check_training_state


class Line(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Counts:
    """A number of each rank's own, and one that all have."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.own, self.shared, self.loaded = torch.zeros(2), 0, []

    def state_dict(self):
        return {**super().state_dict(), "shared": self.shared}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.shared = state["shared"]

    def rank_state_dict(self):
        return {**super().rank_state_dict(), "own": self.own, "steps": int(self.own[0])}

    def load_rank_state_dict(self, state):
        super().load_rank_state_dict(state)
        self.own = state["own"].clone()
        self.loaded.append(state)


class CountingStrategy(Counts, DDPStrategy):
    def optimizer_step(self, optimizer, closure=None):
        self.own += self.global_rank + 1
        self.shared += 1
        return super().optimizer_step(optimizer, closure)


class OtherStrategy(CountingStrategy):
    pass


class SharingStrategy(CountingStrategy):
    """One that adds up the numbers of former ranks and shares them out."""

    def reshard_rank_state(self, states, *, rank, world_size):
        return {"own": sum(state["own"] for state in states) / world_size, "steps": 0}


class CountingPrecision(Counts, Precision):
    def optimizer_step(self, optimizer, closure=None):
        self.own += 10
        return super().optimizer_step(optimizer, closure)


class OtherPrecision(CountingPrecision):
    pass


def discard(kind):
    class Line2(Line):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["rank_states"].pop(kind)

    return Line2()


def fit(strategy, precision=None, callbacks=(), ckpt_path=None, model=None, plugins=(), **options):
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": "auto", "max_epochs": 2, **options}, strategy=strategy,
        callbacks=list(callbacks), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[*([precision] if precision is not None else []), *plugins],
    )  # fmt: skip
    data = torch.ones(12, 2)
    trainer.fit(Line() if model is None else model, torch.utils.data.DataLoader(data, 1), ckpt_path=ckpt_path)
    return trainer


def save(folder, strategy=CountingStrategy, precision=CountingPrecision, plugins=()):
    trainer = fit(strategy(), precision(), [SaveAt(folder, [3])], plugins=plugins)
    trainer.strategy.barrier()


def resume(path, strategy=CountingStrategy, precision=CountingPrecision, **options):
    """What each owner was given, and its own number at the end."""
    strategy, precision = strategy(), precision()
    fit(strategy, precision, ckpt_path=path, **options)
    return [(len(each.loaded), each.own.tolist(), each.shared) for each in (strategy, precision)]


@pytest.fixture(scope="module")
def saved(world2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    world2.run(save, str(folder))
    return str(folder / "batch3.ckpt")


def test_each_rank_gets_its_own(world2, saved):
    """A run of 12 steps that was resumed after 3 ends with the numbers of one that was not."""
    checkpoint = torch.load(saved, weights_only=True)
    assert [entry["strategy"]["steps"] for entry in checkpoint["ranks"]] == [3, 6]
    assert checkpoint["rank_states"]["strategy"]["world_size"] == 2
    assert checkpoint["rank_states"]["precision"]["class"].endswith(".CountingPrecision")
    for rank, (strategy, precision) in enumerate(world2.run(resume, saved)):
        assert strategy == (1, [12.0 * (rank + 1)] * 2, 12)
        assert precision[:2] == (1, [120.0] * 2)


def failing(path, **options):
    strategy = CountingStrategy()
    model = options.pop("model", None) or Line()
    before = copy.deepcopy(model.state_dict())
    try:
        fit(strategy, options.pop("precision", CountingPrecision)(), ckpt_path=path, model=model)
    except Exception as error:
        unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        return type(error).__name__, str(error), unchanged and not strategy.loaded and strategy.shared == 0
    return "", "", False


def test_another_world_is_refused(world3, saved):
    """The strategy, both numbers of ranks and the ways out are named, before anything is restored."""
    for name, message, unchanged in world3.run(failing, saved, timeout=60):
        assert name == CheckpointMismatchError.__name__ and unchanged
        for part in (
            saved,
            "'rank_states'",
            "2 rank(s), and 3 continue(s)",
            "reshard_rank_state",
            "on_load_checkpoint",
        ):
            assert part in message
        assert "precision" in message or "CountingStrategy" in message


def resume_without(path):
    class Free(Line):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["rank_states"].clear()

    return resume(path, model=Free())


def test_state_may_be_left_out(world3, saved):
    """What an on_load_checkpoint hook takes away is begun anew."""
    for strategy, precision in world3.run(resume_without, saved):
        assert strategy[0] == precision[0] == 0 and strategy[2] > 6


def share(path, writing):
    if writing:
        return save(path, SharingStrategy, Precision)
    strategy = SharingStrategy()
    first = []

    class Look(SaveAt):
        def on_train_start(self, trainer, module):
            first.append(strategy.own.tolist())

    fit(strategy, callbacks=[Look("", ())], ckpt_path=path)
    return first[0]


def test_a_strategy_with_a_rule_is_resumed_elsewhere(world2, world3, tmp_path):
    """Two ranks with 3 and 6 become three with 3 each."""
    world2.run(share, str(tmp_path), True)
    assert world3.run(share, str(tmp_path / "batch3.ckpt"), False) == [[3.0, 3.0]] * 3


def resume_as_others(path):
    import warnings

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        seen = resume(path, OtherStrategy, OtherPrecision)
    return seen, [str(warning.message) for warning in noted if "left out" in str(warning.message)]


def test_state_of_another_class_is_left_out(world2, world3, saved):
    """It is never handed to a stranger, on as many ranks or on others, and one warning names its writer."""
    for world in (world2, world3):
        answers = world.run(resume_as_others, saved)
        for seen, _ in answers:
            assert [loads for loads, _, _ in seen] == [0, 0]
        told = answers[0][1]
        assert len(told) == 2 and "CountingPrecision" in told[0] and "OtherStrategy" in told[1]
        assert not any(messages for _, messages in answers[1:])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("del ranks[1]['strategy']", "ranks/1/strategy"),
        ("ranks[1]['precision'] = 3", "ranks/1/precision"),
        ("ranks[0]['strategy'] = {3: 1}", "ranks/0/strategy"),
        ("ranks.append({**ranks[0]})", "rank_states/precision/world_size"),
        ("del ranks[1], ranks[0]['share']", "rank_states/precision/world_size"),
        ("checkpoint['rank_states']['strategy']['world_size'] = True", "rank_states/strategy/world_size"),
        ("del checkpoint['rank_states']['strategy']['class']", "rank_states/strategy/class"),
        ("checkpoint['rank_states']['strategy'] = 'x'", "rank_states/strategy"),
        ("checkpoint['rank_states']['loop'] = {}", "rank_states"),
        ("checkpoint['rank_states'] = []", "rank_states"),
    ],
)
def test_impossible_field_is_named(saved, change, field):
    checkpoint = torch.load(saved, weights_only=True)
    exec(change, {"checkpoint": checkpoint, "ranks": checkpoint["ranks"]})
    with pytest.raises(CheckpointCorruptError, match=f"{re.escape(repr(saved))}.* field '{field}'"):
        check_training_state(checkpoint, saved)


def test_edited_state_is_named(world2, saved, tmp_path):
    """The digests cover it."""
    checkpoint = torch.load(saved, weights_only=True)
    checkpoint["ranks"][1]["strategy"]["own"][0] = 5
    torch.save(checkpoint, tmp_path / "edited.ckpt")
    for name, message, _ in world2.run(failing, str(tmp_path / "edited.ckpt")):
        assert name == CheckpointCorruptError.__name__ and "'ranks/1' holds other values" in message


def test_checkpoint_of_before_resumes(world2, saved, tmp_path):
    """One without the fields begins with new per-rank state, and restores all else."""
    checkpoint = torch.load(saved, weights_only=True)
    for name in ("rank_states", "digests"):
        del checkpoint[name]
    for entry in checkpoint["ranks"]:
        del entry["strategy"], entry["precision"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    for rank, (strategy, _) in enumerate(world2.run(resume, str(tmp_path / "old.ckpt"))):
        assert strategy == (0, [9.0 * (rank + 1)] * 2, 12)


def test_one_process_keeps_its_state(tmp_path):
    """A run without other ranks saves and resumes by the same methods."""
    trainer = fit("single_device", CountingPrecision(), [SaveAt(str(tmp_path), [3])])
    precision = CountingPrecision()
    fit("single_device", precision, ckpt_path=tmp_path / "batch3.ckpt")
    assert len(precision.loaded) == 1 and torch.equal(precision.own, trainer.strategy.precision.own)


def test_nothing_is_gathered_for_nothing(tmp_path, monkeypatch):
    """Without such state no key is written and nothing more is sent."""
    sent = []
    monkeypatch.setattr("torchhal.trainer._rank_states.gather_rank_states", lambda *args: sent.append(args))
    fit("single_device", None, [SaveAt(str(tmp_path), [3])])
    checkpoint = torch.load(tmp_path / "batch3.ckpt", weights_only=True)
    assert sent == [] and "rank_states" not in checkpoint and "strategy" not in checkpoint["ranks"][0]


def test_a_state_must_be_a_dict(tmp_path):
    class Wrong(CountingPrecision):
        def rank_state_dict(self):
            return [1]

    with pytest.raises(TypeError, match=r"Wrong.rank_state_dict must return a dict \(got \[1\]\)"):
        fit("single_device", Wrong(), [SaveAt(str(tmp_path), [3])])


def test_inspect_names_the_writers(tmp_path, capsys):
    """The command lists who has saved per-rank state, and its tensors by rank."""
    fit("single_device", CountingPrecision(), [SaveAt(str(tmp_path), [3])])
    path = str(tmp_path / "batch3.ckpt")
    assert main(["checkpoint", "inspect", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    writer = found["rank_states"]["precision"]
    assert writer["class"].endswith(".CountingPrecision") and writer["world_size"] == 1
    assert "ranks/0/precision/own" in [tensor["name"] for tensor in found["tensors"]]
    assert main(["checkpoint", "inspect", path]) == 0
    assert re.search(r"rank_states +precision '.*' \(.*CountingPrecision\)", capsys.readouterr().out)
    checkpoint = torch.load(path, weights_only=True)
    for lie in ({"strategy": 3}, [1], "x"):
        torch.save({**checkpoint, "rank_states": lie}, tmp_path / "lie.ckpt")
        assert main(["checkpoint", "inspect", str(tmp_path / "lie.ckpt")]) == 0


@pytest.mark.parametrize("weights_only", [True, False])
def test_consolidate_keeps_or_leaves_out_all(tmp_path, weights_only):
    fit("single_device", CountingPrecision(), [SaveAt(str(tmp_path), [3])])
    source, target = str(tmp_path / "batch3.ckpt"), str(tmp_path / "one.ckpt")
    consolidate(TorchCheckpointIO(), source, target, weights_only=weights_only)
    written = torch.load(target, weights_only=True)
    assert ("rank_states" in written) == ("ranks" in written) == (not weights_only)
    if not weights_only:
        precision = CountingPrecision()
        fit("single_device", precision, ckpt_path=target)
        assert len(precision.loaded) == 1
