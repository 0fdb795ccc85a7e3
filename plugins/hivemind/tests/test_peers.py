"""Peers as processes of their own: they join late, die, are stopped, and come back from a checkpoint."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from limits import scaled
from processes import alive, assert_gone, descendants

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("peer.py")
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
TARGET = 96
SOCKETS = re.compile(r"/tmp/torchhal-hivemind-\w+")


class Peer:
    def __init__(self, folder, *, peers=None, by_environment=False, **options):
        self.folder = folder
        folder.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHHAL_HIVEMIND")}
        if by_environment:
            environ["TORCHHAL_HIVEMIND_PEERS"] = peers
        elif peers is not None:
            options["initial_peers"] = peers
        command = [sys.executable, str(SCRIPT), str(folder), json.dumps({"target_batch_size": TARGET, **options})]
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=self.output, env=environ, start_new_session=True
        )

    @property
    def said(self):
        return (self.folder / "output").read_text()

    @property
    def log(self):
        """(step, epoch, rate, loss) of each step of the collaboration that it has seen."""
        try:
            lines = (self.folder / "log").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [tuple(map(float, line.split())) for line in lines if line.endswith("\n")]

    @property
    def step(self):
        return self.log[-1][0] if self.log else -1

    def wait_until(self, true, what, timeout=90.0):
        deadline = time.monotonic() + scaled(timeout)
        while not true():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < deadline, f"never {what}:\n{self.said}\n{self.log[-5:]}"
            time.sleep(0.1)

    def wait_for_step(self, step):
        self.wait_until(lambda: self.step >= step, f"step {step}")
        return self

    @property
    def addresses(self):
        self.wait_until((self.folder / "addresses").exists, "training")
        return (self.folder / "addresses").read_text()

    def states(self):
        """The model right after each epoch, by epoch, as files."""
        return {int(path.stem): path for path in (self.folder / "states").glob("*.pt")}

    def descendants(self):
        return descendants(self.process.pid)

    def end(self):
        (self.folder / "stop").touch()
        code = self.process.wait(60)
        assert code == 0, self.said


def wait_until_they_agree(one, other, *, after, tolerance):
    """Until the models of both, right after one epoch, show no difference beyond what is sent.

    On a busy machine some rounds of averaging fail, several in a row; what they leave is taken out by the next.
    """

    def differences():
        mine, theirs = one.states(), other.states()
        epochs = sorted(epoch for epoch in mine.keys() & theirs.keys() if epoch > after)
        return {epoch: difference(torch.load(mine[epoch]), torch.load(theirs[epoch])) for epoch in epochs[-5:]}

    one.wait_until(lambda: min(differences().values(), default=1.0) <= tolerance, "as the other one is", 150.0)


def difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point())


def assert_learns(peer):
    """Soon, that is: a loss is of one batch, and how many steps an epoch has depends on who is quick."""

    def learns():
        losses = [loss for _, _, _, loss in peer.log]
        return sum(losses[-5:]) < 0.8 * sum(losses[:5])

    peer.wait_until(learns, "better")


@pytest.fixture
def start(tmp_path):
    started = []

    def start(name, **options):
        started.append(Peer(tmp_path / name, **options))
        return started[-1]

    yield start
    for peer in started:
        left = peer.descendants()
        if peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait()
        assert_gone(left)
        peer.output.close()


@pytest.mark.timeout(400)  # some 40 s on a quiet machine
def test_peers_come_and_go(start):
    start = partial(start, compression="float16")
    first = start("first", seed=1).wait_for_step(1)
    assert "others join run 'torchhal' with the same script and TORCHHAL_HIVEMIND_PEERS=/ip4/127.0.0.1/" in first.said

    # one joins by the environment, where the first of two addresses is nobody's
    second = start("second", peers=f"{NOBODY},{first.addresses}", by_environment=True, seed=2)
    second.wait_for_step(first.step + 2)
    assert second.log[0][0] >= 1 and "joined run 'torchhal' at step" in second.said

    # another run under the same name: refused, with both values
    other = start(
        "other", peers=first.addresses, target_batch_size=TARGET + 1, averaging="state", compression="none",
        model={"width": 17, "optimizer": "SGD"}, trainer={"gradient_clip_val": 0.5},
    )  # fmt: skip
    # one is late, from other weights, and goes on where the others are
    late = start("late", peers=first.addresses, seed=3)
    late.wait_for_step(second.step + 2)
    assert late.log[0][0] >= 3
    rates = {step: rate for step, _, rate, _ in first.log}
    assert all(rates.get(step, rate) == rate for step, _, rate, _ in late.log), (first.log, late.log)
    assert other.process.wait(60) == 1
    for words in (
        "ConfigurationError: the peers of run 'torchhal' have target_batch_size=96 (here it is 97) and "
        "averaging='gradients' (here it is 'state') and model='",
        " and optimizer='Adam' (here it is 'SGD') and gradient_clip_val=None (here it is 0.5): all must use the same",
    ):
        assert words in other.said, other.said

    # one is killed: nothing of it is left, and the others train on
    orphans = second.descendants()
    assert len(orphans) >= 4, "the node, its daemon and two averagers"
    (sockets,) = {found[0] for command in alive(orphans).values() if (found := SOCKETS.search(command))}
    assert Path(sockets).is_dir()
    second.process.kill()
    second.process.wait()
    assert_gone(orphans)
    assert not Path(sockets).exists()
    at_kill = int(max(first.step, late.step))
    first.wait_for_step(at_kill + 4)
    late.wait_for_step(at_kill + 4)

    wait_until_they_agree(first, late, after=at_kill, tolerance=1e-5)
    assert_learns(first)

    # a scheduler stops one, with its whole group: a checkpoint, and nothing left
    group = first.descendants() | {first.process.pid}
    os.killpg(first.process.pid, signal.SIGTERM)
    assert first.process.wait(60) == 128 + signal.SIGTERM, first.said
    assert "fit stopped on SIGTERM at step" in first.said
    assert_gone(group)
    (saved,) = (first.folder / "checkpoints").glob("*interrupt*")
    step = torch.load(saved, weights_only=True)["global_step"]

    # whoever continues from it among others who are further is where they are, and goes on when they leave
    late.wait_for_step(step + 2)
    back = start("back", peers=late.addresses, ckpt_path=str(saved), seed=4).wait_for_step(step + 2)
    assert back.log[0][0] > step, back.log
    # which one does when its daemon dies: without it would train by itself, further from the others with each step
    (daemon,) = (pid for pid, command in alive(late.descendants()).items() if "p2pd" in command)
    os.kill(daemon, signal.SIGKILL)
    assert late.process.wait(60) == 1
    assert "DistributedError: hivemind's network daemon, p2pd, has ended; this peer can't go on" in late.said
    back.wait_for_step(back.step + 2)

    # without one of hivemind's processes it would wait for ever
    group = back.descendants()
    averager = max(pid for pid, command in alive(group).items() if "peer.py" in command)
    os.kill(averager, signal.SIGKILL)
    assert back.process.wait(60) == 1
    assert "hivemind's process 'Gradients-3' was ended by signal 9 (SIGKILL)" in back.said
    assert_gone(group)


@pytest.mark.timeout(400)  # some 20 s on a quiet machine
def test_peers_that_step_by_themselves_average_their_state(start):
    options = {"averaging": "state", "state_compression": "float16"}
    one = start("one", seed=1, **options)
    other = start("other", seed=2, peers=one.addresses, **options)
    one.wait_until(lambda: other.log and one.log[-1][1] >= other.log[0][1] + 4, "four epochs together", 120.0)
    other.wait_until(lambda: other.log[-1][1] >= one.log[-1][1] - 1, "as far")
    wait_until_they_agree(one, other, after=3, tolerance=2e-3)  # what float16 gives
    assert_learns(one)
    assert one.log[-1][0] > 3 * one.log[-1][1]  # many steps of its own to an epoch
    other.end()
    one.end()
