"""A peer that is alone trains as plain PyTorch does with the same samples behind each step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from limits import scaled
from peer import Net, batches


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    script = Path(__file__).with_name("alone.py")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHHAL_HIVEMIND")}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(folder / "results.pt")
    found["stderr"] = done.stderr
    return found


def plain(data, target, clip=None, own_steps=False, dtype=None):
    """Parameters and rate after a loop that steps when ``target`` samples have come."""
    torch.manual_seed(0)
    model = Net()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    epochs, waiting = 0, []
    for batch in data:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = model.training_step(batch, 0)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        waiting.append((len(batch[0]), gradients))
        samples = sum(count for count, _ in waiting)
        if samples >= target or own_steps:
            for index, parameter in enumerate(model.parameters()):
                own = waiting[-1:] if own_steps else waiting
                total = sum(count for count, _ in own)
                parameter.grad = sum(count * each[index] for count, each in own) / total
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        if samples >= target:
            epochs += 1
            scheduler.step()
            waiting.clear()
    return model.state_dict(), epochs, optimizer.param_groups[0]["lr"]


def assert_as_plain(found, data, target, **options):
    state, epochs, rate = plain(data, target, **options)
    assert (found["epoch"], found["lr"]) == (epochs, rate)
    for name, value in state.items():
        torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-6, msg=name)


DATA = batches(1, 24)


@pytest.mark.slow
def test_accumulation_clipping_and_schedule(results):
    assert_as_plain(results["clipped"], DATA, 32, clip=0.05)
    assert results["clipped"]["step"] == 6


@pytest.mark.slow
def test_a_checkpoint_resumes_exactly_here_and_under_another_strategy(results):
    for name in ("resumed", "late", "elsewhere"):
        assert (results[name]["step"], results[name]["lr"]) == (6, results["clipped"]["lr"])
        for key, value in results["clipped"]["state"].items():
            torch.testing.assert_close(results[name]["state"][key], value, rtol=0, atol=1e-6, msg=f"{name} {key}")
    assert results["resumed"]["epoch"] == 6


def test_a_checkpoint_of_another_strategy_goes_on_at_its_step(results):
    assert_as_plain(results["returned"], DATA * 2, 32, clip=0.05)
    assert results["returned"]["step"] == results["returned"]["epoch"] == 12


def test_an_error_in_the_optimizers_step_is_raised(results):
    assert results["failing"][:2] == ("ArithmeticError", "no second step")
    assert results["failing"][3] == []


def test_the_trainers_own_accumulation_counts_all_its_samples(results):
    assert_as_plain(results["accumulated"], DATA, 32)


def test_batches_weigh_by_their_samples(results):
    data = [(x[: 8 - index % 3], y[: 8 - index % 3]) for index, (x, y) in enumerate(DATA)]
    assert_as_plain(results["uneven"], data, 14)


def test_a_peer_that_averages_state_steps_by_itself(results):
    assert_as_plain(results["own steps"], DATA, 32, own_steps=True)
    assert results["own steps"]["step"] == 24  # its own; the schedule followed the six epochs of the collaboration


def test_a_process_killed_with_hiveminds_locks_hangs_no_later_run(results):
    assert_as_plain(results["after a kill"], DATA, 32, own_steps=True)


def test_mixed_precision(results):
    state, epochs, rate = plain(DATA, 32, dtype=torch.bfloat16)
    assert (results["bf16"]["step"], results["bf16"]["lr"]) == (epochs, rate)
    for name, value in state.items():
        torch.testing.assert_close(results["bf16"]["state"][name], value, rtol=0, atol=1e-5, msg=name)


def test_nothing_is_left_behind(results):
    runs = [value for value in results.values() if isinstance(value, dict)]
    assert results["seen"] >= 9 * 3, "a node, its daemon and an averager or two for each"
    assert len(runs) == 10 and all(run["left"] == [] for run in runs)
    assert results["interrupt"] and results["interrupt_after"], "Ctrl-C no longer works"
    assert results["sharing"][0] == results["sharing"][1]
    assert results["unanswered"][3] == []


def test_the_first_peer_says_how_to_join(results):
    lines = [line for line in results["stderr"].splitlines() if "others join run" in line]
    assert len(lines) >= 6
    assert lines[0].startswith("torchhal: others join run 'torchhal' with the same script and TORCHHAL_HIVEMIND_PEERS=")
    assert "/ip4/127.0.0.1/tcp/" in lines[0] and "/p2p/" in lines[0]


def test_peers_that_nobody_answers_for(results):
    kind, message, seconds, _ = results["unanswered"]
    assert kind == "DistributedError"
    assert message.startswith("none of 'initial_peers' answered within 5 s (/ip4/127.0.0.1/tcp/9/p2p/Qm")
    assert seconds < scaled(60)


def test_a_batch_without_a_size(results):
    (kind, message), left, steps = results["unsized"]
    assert kind == "ModelError" and "type Unsized: give HivemindStrategy(batch_size=...)" in message
    assert (left, steps) == ([], 1)
