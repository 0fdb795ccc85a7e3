"""Replica groups as processes of their own: they join late, are killed and stopped, and come back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lighthouses import lighthouse
from replica import BATCH, GROUPS, Items, Net, make_scaler
from torch.utils.data import DistributedSampler

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("replica.py")


class Group:
    def __init__(self, folder, address, **options):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        own = ("TORCHFT", "REPLICA_GROUP", "NUM_REPLICA")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environ.update(TORCHFT_LIGHTHOUSE=address)
        self.output = (folder / "output").open("a+")
        self.before = len(self.log)
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), json.dumps(options)],
            stdout=self.output, stderr=self.output, env=environ, start_new_session=True,
        )  # fmt: skip

    @property
    def said(self):
        return (self.folder / "output").read_text()

    @property
    def log(self):
        """What stands in the log, of earlier lives too."""
        path = self.folder / "log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def own(self):
        return self.log[self.before :]

    @property
    def step(self):
        return self.own[-1]["step"] if self.own else -1

    def wait_until(self, true, what, timeout=120.0):
        deadline = time.monotonic() + timeout
        while not true():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < deadline, f"never {what}:\n{self.said}\n{self.own[-5:]}"
            time.sleep(0.2)

    def wait_for_steps(self, count, groups):
        """So many steps in the company of ``groups`` in all, from now on."""
        begin = len(self.own)
        self.wait_until(
            lambda: sum(line["groups"] == groups for line in self.own[begin:]) >= count, f"{count} of {groups}"
        )

    def end_at(self, step):
        (self.folder / "end").write_text(str(step))

    def final(self):
        assert self.process.wait(120) == 0, self.said
        return torch.load(self.folder / "final.pt", weights_only=True)


@pytest.fixture
def start(tmp_path):
    started = []
    # Longer than a busy machine may stand still; it is what a group that died is waited for.
    with lighthouse(join_timeout_ms=60_000, heartbeat_timeout_ms=4_000) as address:

        def start(name, **options):
            started.append(Group(tmp_path / name, address, **options))
            return started[-1]

        yield start
        for group in started:
            if group.process.poll() is None:
                os.killpg(group.process.pid, signal.SIGKILL)
            group.process.wait()
            group.output.close()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        if isinstance(one[name], dict):
            assert_equal(one[name], other[name])
        else:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=str(name))


def share(rank, epoch, batch):
    """The rule: all groups shuffle alike, each takes every n-th sample."""
    sampler = DistributedSampler(Items(), num_replicas=GROUPS, rank=rank, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)[batch * BATCH : (batch + 1) * BATCH]


def replay(steps):
    """Plain PyTorch with the mean gradient over the batches of those that took part, step by step."""
    model, items, scaler = Net(), Items(), make_scaler()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    skipped = 0
    for batches in steps:
        gradients = []
        for indices in batches:
            batch = torch.utils.data.default_collate([items[index] for index in indices])
            with torch.autocast("cpu", torch.float16):
                loss = model.training_step(batch, 0)
            gradients.append(torch.autograd.grad(scaler.scale(loss), list(model.parameters())))
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(each).mean(0)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            scheduler.step()
    return model.state_dict(), optimizer.param_groups[0]["lr"], scaler.get_scale(), skipped


@pytest.mark.timeout(400)  # some 35 s on a quiet machine
def test_groups_leave_and_come_back_while_the_others_train_on(start):
    one = start("one", replica_rank=0)
    one.wait_for_steps(3, groups=1)

    # a second one joins, from other weights, in the midst of an epoch
    two = start("two", replica_rank=1, seed=1)
    one.wait_for_steps(4, groups=2)
    two.wait_until(lambda: len(two.own) >= 3, "training")
    assert "joined at step" in two.said

    # it is killed: the first goes on alone, without a restart; also when one comes that trains something else
    two.process.kill()
    two.process.wait()
    other = start("other", replica_rank=1, width=17)
    one.wait_for_steps(3, groups=1)
    assert other.process.wait(120) == 1, other.said
    assert "CheckpointMismatchError: this replica group trains something else than the others: the" in other.said
    assert "size mismatch for body.0.weight" in other.said and not other.own
    one.wait_until(lambda: "is not taken, and its batch dropped" in one.said, "left by it")
    one.wait_for_steps(1, groups=1)

    # its replacement is where the first is by then, and the first is stopped as a scheduler stops it
    again = start("two", replica_rank=1, seed=2)
    again.wait_for_steps(3, groups=2)
    os.killpg(one.process.pid, signal.SIGTERM)
    assert one.process.wait(60) == 128 + signal.SIGTERM, one.said
    assert "fit stopped on SIGTERM at step" in one.said
    (saved,) = (one.folder / "checkpoints").glob("*interrupt*")
    stopped_at = torch.load(saved, weights_only=True)["global_step"]
    again.wait_for_steps(3, groups=1)

    # it comes back from its checkpoint, among others who are further
    back = start("one", replica_rank=0, ckpt_path=str(saved), seed=3)
    back.wait_for_steps(3, groups=2)
    assert back.own[0]["step"] > stopped_at + 1
    end = max(back.step, again.step) + 5
    for group in (back, again):
        group.end_at(end)
    mine, theirs = back.final(), again.final()
    assert mine["step"] == end
    assert_equal(mine, theirs)

    # Each step that was counted, by whom it was made; who was killed may not have written its last one down.
    made = {}
    for rank, group in ((0, one), (1, two)):
        for line in group.log:
            assert line["items"] == share(rank, line["epoch"], line["batch"]), line
            place = line["epoch"], line["batch"]
            ranks = range(GROUPS) if line["groups"] == 2 else [rank]
            assert made.setdefault(line["step"], (place, list(ranks))) == (place, list(ranks)), line
    assert sorted(made) == list(range(1, end + 1))
    steps = [[share(rank, *made[step][0]) for rank in made[step][1]] for step in sorted(made)]
    state, rate, scale, skipped = replay(steps)
    assert (mine["scheduler"]["_last_lr"], mine["precision"]["scale"]) == ([rate], scale)
    assert skipped, "the scaler was to have something to do"
    for name, value in state.items():
        torch.testing.assert_close(mine["model"][name], value, rtol=0, atol=1e-4, msg=name)
