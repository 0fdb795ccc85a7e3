"""A replica group that is alone trains as plain PyTorch does; what goes wrong is an error that says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lighthouses import lighthouse
from limits import scaled
from lone_group import NOBODY, Small, batches
from torch.utils.data import DistributedSampler


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lone")
    script = Path(__file__).with_name("lone_group.py")
    own = ("TORCHFT", "REPLICA_GROUP", "NUM_REPLICA")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    # each fit is a run of its own: one that has ended must not count as there for long
    quick = {"join_timeout_ms": 250, "heartbeat_timeout_ms": 250}
    with lighthouse(**quick) as address, lighthouse(min_replicas=2) as of_two:
        environ.update(TORCHFT_LIGHTHOUSE=address, LIGHTHOUSE_OF_TWO=of_two)
        command = [sys.executable, str(script), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**torch.load(folder / "results.pt", weights_only=False), "stderr": done.stderr}


@pytest.fixture(autouse=True)
def one_thread():
    """As in the script: how many there are changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(data, accumulate=1, clip=None, left_out=()):
    model = Small()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index, batch in enumerate(data):
        (model.training_step(batch, index) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if index not in left_out:
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
    return model.state_dict(), optimizer.param_groups[0]["lr"]


def assert_equal(found, state):
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", ["clipped", "resumed"])
def test_a_lone_group_is_a_plain_loop_and_resumes_exactly(results, name):
    state, rate = plain(batches() * 2, accumulate=2, clip=0.05)
    assert_equal(results[name]["state"], state)
    assert (results[name]["lr"], results[name]["step"]) == (rate, 12)


def test_a_step_that_is_refused_does_not_count(results):
    found = results["spoiled"]
    state, rate = plain(batches(), clip=0.05, left_out=(2, 7))
    assert_equal(found["state"], state)
    assert (found["lr"], found["step"], found["batches"]) == (rate, 10, 12)
    assert [count > 0 for count in results["with gradients"]] == [index not in (2, 7) for index in range(12)]
    assert "torchhal: step 3 is not taken, and its batch dropped: spoiled" in results["stderr"]
    kind, message, _ = results["always spoiled"]
    assert kind == "DistributedError" and "exceeding max_retries=2" in message


def test_a_group_reads_its_share_and_validates_on_all(results):
    sampler = DistributedSampler(range(20), num_replicas=3, rank=1, shuffle=True, seed=0)
    assert results["share"]["seen"] == list(sampler)
    assert results["share"]["validated"] == 20 + 8  # with the sanity check's two batches
    assert sorted(results["whole"]["seen"]) == list(range(20))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("unreachable", "DistributedError", f"no lighthouse answers at {NOBODY!r} within connect_timeout=1 s "),
        ("unreachable", "DistributedError", "start one with `torchft_lighthouse --min_replicas 1 --bind '[::]:29510'`"),
        ("skips", "ModelError", "training_step returned None, and the other replica groups wait for this one's grad"),
        ("nameless", "ConfigurationError", "its host's name 'no-such-host.invalid' can't be resolved"),
        ("no quorum", "DistributedError", "found no quorum within quorum_timeout=1 s, at step 0"),
        ("too few", "DistributedError", "waited quorum_timeout=1 s for others: there are 1, and min_replica_size=2"),
    ],
)
def test_who_finds_nobody_says_what_it_waited_for(results, name, kind, words):
    assert results[name][0] == kind
    assert words in results[name][1]
    assert results[name][2] < scaled(60)


def test_sigterm_is_heard_while_waiting_for_others(results):
    kind, code, seconds, saved = results["stopped"]
    assert (kind, code, saved) == ("SystemExit", "143", 1)
    assert seconds < scaled(60)


def test_a_loop_by_hand_steps_the_same_way(results):
    state, taken = results["by hand"]
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    assert_equal(state, model.state_dict())
    assert [(each.steps, each.updated) for each in taken] == [(1, True)] * 12


def test_the_mean_is_over_those_who_contribute(results):
    found = results["averages"]
    assert found["taken 0"] == {} and found["taken 1"] == {"from": 0}  # at step 0 all begin as one of them does
    values = {rank: [_values(gradients) for _, gradients in found[rank]] for rank in (0, 1)}
    assert all(committed for rank in (0, 1) for committed, _ in found[rank])
    # of 1 and 3; the fourth only one group has used, the fifth nobody
    assert values[0][0] == values[1][0] == [2.0, 2.0, 2.0j, 0.5, None, 2.0]
    assert values[0][1] == values[1][1] == [1.0, 1.0, 1.0j, 1.0, None, 1.0]


def _values(gradients):
    for gradient in gradients:
        assert gradient is None or (gradient == gradient.flatten()[0]).all()
    return [None if gradient is None else gradient.flatten()[0].item() for gradient in gradients]


def test_nothing_is_left_after_a_run(results):
    before, after, names = results["threads"]
    assert after[0] <= before[0] and after[1] <= before[1], names
