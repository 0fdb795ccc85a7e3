"""What a step may do in a pipeline, what it may not, and who sees what it logs."""

import pytest
import staged
import torch

from torchhal_parallel._batch_loss import Branches

pytestmark = pytest.mark.timeout(170)


def test_values_of_steps_reach_who_looks(world2, tmp_path):
    """The loggers, a monitor, an early stop, a plateau and the views of every rank, as in one process."""
    expected = staged.values_of_steps("single_device", str(tmp_path / "one"))
    results = world2.run(staged.values_of_steps, "pipeline", str(tmp_path / "two"), timeout=100)
    assert [result["leader"] for result in results] == [False, True]
    assert expected["epochs"] < 4 and len(set(expected["rates"])) > 1, "the stop and the plateau have acted"
    rows = results[0]["rows"]
    assert [step for step, _ in rows] == [step for step, _ in expected["rows"]]
    for (_, ours), (_, theirs) in zip(rows, expected["rows"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    assert not results[1]["rows"]
    for result in results:
        assert result["epochs"] == expected["epochs"]
        assert result["rates"] == pytest.approx(expected["rates"])
        assert list(result["kept"]) == list(expected["kept"])
        assert result["kept"] == pytest.approx(expected["kept"], abs=2e-5)
        for (ours, bar), (theirs, their_bar) in zip(result["seen"], expected["seen"], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5)
            assert bar == pytest.approx(their_bar, abs=2e-5)


def test_one_learning_rate_for_all_ranks(world2):
    """Ranks that log losses of their own keep one learning rate."""
    first, second = world2.run(staged.plateau_of_each_rank, "ddp", timeout=60)
    assert first == second and len(set(first)) > 1


def test_a_resumed_pipeline_shows_its_own_steps(world2, tmp_path):
    path = str(tmp_path / "half.ckpt")
    before, expected = staged.begun(path)
    for shown in world2.run(staged.resumed, path, timeout=60):
        assert shown == pytest.approx(expected, abs=2e-5) and abs(shown - before) > 1e-4


def test_a_step_sees_each_sample_once(world2):
    """A metric object, an attribute, and what the step returns; the batch's list of names is divided as its tensors."""
    metrics, total, seen, outputs = staged.measured("single_device")
    first, last = world2.run(staged.measured, "pipeline", timeout=60)
    for ours in (first, last):
        assert ours[0] == pytest.approx(metrics, abs=1e-6)
        assert ours[1] == total == staged.SAMPLES
    assert first[2] == [] and first[3] is None, "no step ends there"
    assert last[2] == seen
    assert last[3]["loss"] == pytest.approx(outputs["loss"], abs=1e-5)
    assert (last[3]["positive"], last[3]["names"]) == (outputs["positive"], outputs["names"])


UNTRIED = [
    ("Noisy", {}, ["training_step", "random numbers (torch)", "forward"]),
    ("NoisyValidation", {"options": {"num_sanity_val_steps": 1}}, ["validation_step", "random numbers"]),
    ("Counting", {}, ["'total'", "before it calls self(...)", "microbatch"]),
    ("MeasuringInputs", {}, ["'inputs.", "before it calls self(...)"]),
    ("KeepingBatches", {}, ["'batches'", "before it calls self(...)"]),
    ("WithAForwardOfItsOwn", {}, ["forward", "set on the object"]),
    ("Flattens", {}, ["32 samples", "16"]),
    ("Stack", {"options": {"microbatches": 5}}, ["a batch of 16 samples", "5 microbatches"]),
    ("Stack", {"count": 18}, ["the last batch of an epoch of 2 samples", "4 microbatches", "drop_last=True"]),
]


@pytest.mark.parametrize("model, given, words", UNTRIED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_before_anything_is_trained(world2, model, given, words):
    count, own_collate, options = given.get("count", staged.SAMPLES), False, given.get("options")
    for kind, message, batches in world2.run(staged.attempt, model, count, own_collate, options, timeout=60):
        assert (kind, batches) == ("ModelError", 0), message
        for word in words:
            assert word in message


def test_unreached_last_batch_is_allowed(world2):
    """A last batch that is not reached is no matter."""
    assert world2.run(
        staged.attempt, "Stack", 18, False, {"limit_train_batches": 1}, timeout=60
    ) == [("nothing", "", 2)] * 2  # fmt: skip
    assert world2.run(staged.attempt, "Stack", 18, False, {"max_steps": 1}, timeout=60) == [("nothing", "", 1)] * 2


def test_indivisible_batch_refused_when_it_comes(world2):
    """A batch of an unknown size is refused when it comes."""
    for kind, message, batches in world2.run(staged.attempt, "Stack", 18, True, timeout=60):
        assert (kind, batches) == ("ModelError", 1)
        assert "2 samples" in message and "4 microbatches" in message


def test_the_model_is_called_in_its_steps_only(world2):
    for kind, message, batches in world2.run(staged.attempt, "CallsItselfInAHook", timeout=60):
        assert (kind, batches) == ("ModelError", 1)
        for word in ("CallsItselfInAHook", "outside of its steps", "validation_step"):
            assert word in message


def test_a_loop_by_hand(world2):
    first, last = world2.run(staged.without_a_trainer, timeout=60)
    assert first[0] == [None] * 3
    assert last[0] == pytest.approx(last[1], abs=2e-5)


def test_schedules_of_many_shapes_do_not_pile_up(world2):
    _, expected = staged.lengths("single_device")
    for kept, parameters in world2.run(staged.lengths, "pipeline", timeout=60):
        assert kept == 8 and parameters
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_parts_come_together_tensor_by_tensor(world2):
    results = world2.run(staged.gathered, timeout=60)
    brought = [mine for _, _, mine in results]
    assert results[1][0] is None
    for parts in (results[0][0], results[0][1], results[1][1]):
        assert len(parts) == 2
        for part, mine in zip(parts, brought, strict=True):
            assert part.keys() == mine.keys() and part["other"] == mine["other"]
            for name in mine.keys() - {"nested", "other"}:
                torch.testing.assert_close(part[name], mine[name], rtol=0, atol=0)
            assert part["nested"][0]["step"] == 3 and torch.equal(
                part["nested"][0]["count"], mine["nested"][0]["count"]
            )


def test_every_axis_waits_as_long_as_the_world(world4):
    """torch gives the groups of a mesh half an hour."""
    for seconds in world4.run(staged.timeouts, timeout=150):
        assert seconds == [77.0] * 3


OUTPUT = torch.ones(3, requires_grad=True)
LOSS = OUTPUT.sum()


@pytest.mark.parametrize(
    ("ask", "taken"),
    [
        (lambda: LOSS > 1 and None, [True]),
        (lambda: bool(LOSS), [True]),
        (lambda: max(LOSS, torch.tensor(9.0)), [True]),
        (lambda: (LOSS.detach() > 1).item() or None, [True]),
        (lambda: (LOSS.data > 9).item() or None, [False]),
        (lambda: not torch.isfinite(LOSS).all(), [True]),
        (lambda: bool((LOSS > 1) & (LOSS < 2)), [False]),
        (lambda: bool(torch.gt(input=LOSS, other=1)), [True]),
        (lambda: bool((OUTPUT > 1).any()), [False]),
        (lambda: LOSS.item() > 1, []),
        (lambda: bool((OUTPUT.argmax() == 0).all()), []),
        (lambda: torch.zeros(()) > 1 and None, []),
        (lambda: OUTPUT.dim() > 1 and OUTPUT.shape[0] > 1, []),
    ],
)
def test_what_counts_as_a_branch_on_a_loss(ask, taken):
    with Branches() as branches:
        ask()
    assert branches.taken == taken
