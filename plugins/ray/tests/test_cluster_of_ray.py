"""A fit on a Ray cluster: what comes back, who is which rank, and what follows when something dies, fails or lacks."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from limits import scaled
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal.errors import ConfigurationError, LaunchError, RankFailedError
from torchhal_ray import RayEnvironment

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.timeout(300)]  # each worker imports torch, on two cores

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Net(torchhal.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.0)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class At(torchhal.Callback):
    """Does something on one rank before one of its batches."""

    def __init__(self, rank, batch, action, argument):
        self.rank, self.batch, self.action, self.argument = rank, batch, action, argument

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx == self.batch:
            self.action(self.argument)


class Places(torchhal.Callback):
    """Where each rank runs; its state comes back to the driver."""

    def __init__(self):
        self.seen = []

    def on_fit_start(self, trainer, module):
        import ray

        strategy = trainer.strategy
        environment = strategy.cluster_environment
        mine = (
            strategy.global_rank, environment.node_rank(), strategy.local_rank, environment.local_world_size(),
            ray.get_runtime_context().get_node_id(), os.environ.get("FROM_THE_DRIVER"), os.environ["TORCHHAL_SEED"],
            os.getcwd(), threading.current_thread() is threading.main_thread(), environment.num_nodes(),
        )  # fmt: skip
        self.seen = strategy.all_gather_object(mine)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def data(batch_size):
    return DataLoader(TensorDataset(X, Y), batch_size)


def plain_loop(epochs, batch_size):
    """The same, without torchhal, in one process on the whole batch."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for start in range(0, len(X), batch_size):
            x, y = X[start : start + batch_size], Y[start : start + batch_size]
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model.layer(x), y)
            loss.backward()
            optimizer.step()
    return model, loss


@pytest.mark.slow
def test_the_same_fit_as_in_one_process(two_nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHHAL_SEED", "17")
    monkeypatch.chdir(tmp_path)
    places, model = Places(), Net()
    launcher = RayEnvironment(num_workers=3, runtime_env={"env_vars": {"FROM_THE_DRIVER": "yes"}})
    trainer = torchhal.Trainer(
        accelerator="cpu", plugins=launcher, max_epochs=2, callbacks=places, default_root_dir=tmp_path, **QUIET
    )
    assert (trainer.plan.strategy.alias, trainer.plan.launcher, trainer.plan.world_size) == ("ddp", "ray", 3)
    trainer.fit(model, data(4))
    expected, loss = plain_loop(2, 12)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert trainer.global_step == 8
    torch.testing.assert_close(trainer.callback_metrics["loss"], loss)
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    torch.testing.assert_close(saved["state_dict"]["layer.weight"], expected.layer.weight.data)
    # three workers fill one node and begin the other; the driver's own comes first
    here = two_nodes.ray.get_runtime_context().get_node_id()
    sizes = [row[3] for row in places.seen]
    nodes = [0, 0, 1] if sizes[0] == 2 else [0, 1, 1]
    assert [row[:4] for row in places.seen] == [
        (rank, node, nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)
    ]
    assert [row[4] == here for row in places.seen] == [node == 0 for node in nodes]
    assert {row[5:] for row in places.seen} == {("yes", "17", str(tmp_path), True, 2)}
    # a second call of the same Trainer starts workers anew, with the weights of now
    predictions = torch.cat(trainer.predict(model, data(6)))
    assert sorted(predictions.flatten().tolist()) == pytest.approx(sorted(model.layer(X).flatten().tolist()))
    assert two_nodes.is_free()


@pytest.mark.slow
def test_the_script_of_the_page(two_nodes, tmp_path):
    said = two_nodes.run_from_page("train.py", tmp_path)
    # the same line of both, each with its rank, without a word of RAY_DEDUP_LOGS
    assert {int(rank) for rank in re.findall(r"\(rank (\d) .*epoch 1 begins", said)} == {0, 1}, said
    assert "8 steps, loss " in said
    assert Path(re.search(r"saved (.*\.ckpt)", said)[1]).is_relative_to(tmp_path)
    assert two_nodes.is_free()


class OwnError(ValueError):
    pass


def fail(message):
    raise OwnError(message)


def kill(signum):
    os.kill(os.getpid(), signum)


def hang(seconds):
    time.sleep(seconds)


def fit(*callbacks, **options):
    options = {"num_workers": 2, **options}
    trainer = torchhal.Trainer(
        accelerator="cpu", plugins=RayEnvironment(**options), max_epochs=3, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, **QUIET,
    )  # fmt: skip
    trainer.fit(Net(), data(4))


@pytest.mark.slow
def test_an_exception_comes_back_with_its_traceback(two_nodes):
    with pytest.raises(RankFailedError, match="rank 1 failed: OwnError: bad sample") as caught:
        fit(At(1, 2, fail, "bad sample"))
    assert caught.value.rank == 1
    assert "in fail\n" in caught.value.traceback
    assert isinstance(caught.value.__cause__, OwnError)
    assert two_nodes.is_free()


@pytest.mark.slow
def test_a_killed_worker_ends_the_run(two_nodes):
    # the other hangs where no closed connection reaches it: only the launcher can end it
    with pytest.raises(
        RankFailedError, match=r"rank 1 on node [\d.]+ \(\w{8}\) died: .*worker process has died"
    ) as caught:
        fit(At(1, 2, kill, signal.SIGKILL), At(0, 2, hang, 120))
    assert caught.value.rank == 1
    assert two_nodes.is_free()


@pytest.mark.slow
def test_a_removed_node_ends_the_run(two_nodes, tmp_path):
    node = two_nodes.add_node(spot=2)
    begun = tmp_path / "begun"

    def remove():
        while not begun.exists():
            time.sleep(0.05)
        two_nodes.cluster.remove_node(node)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        with pytest.raises(RankFailedError, match=r"rank \d on node [\d.]+ \(\w{8}\) died: .*node") as caught:
            fit(At(0, 2, Path.touch, begun), At(0, 3, hang, 120), At(1, 3, hang, 120),
                resources_per_worker={"CPU": 1, "spot": 1})  # fmt: skip
    finally:
        begun.touch()
        thread.join()
    assert node.node_id[:8] in str(caught.value)
    assert two_nodes.is_free()


def signal_when(begun):
    """SIGTERM to this process once the file is there; the thread that sends it."""

    def stop():
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.5, 1.5, 3.0, 5.0, "setup"])
def test_a_signal_while_the_workers_start_ends_them_at_once(two_nodes, tmp_path, moment):
    """Not after the minute that workers get to save."""

    class Sleeps(torchhal.Callback):
        def setup(self, trainer, module, stage):
            if moment == "setup":
                (tmp_path / "begun").touch()
                time.sleep(600)

    signalled = []

    def stop():
        wait = time.monotonic() + (60 if moment == "setup" else moment)
        while time.monotonic() < wait and not (tmp_path / "begun").exists():
            time.sleep(0.05)
        signalled.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    trainer = torchhal.Trainer(
        accelerator="cpu", plugins=RayEnvironment(num_workers=2), max_epochs=-1, logger=False, callbacks=[Sleeps()],
        default_root_dir=f"file://{tmp_path}", **QUIET,
    )  # fmt: skip
    thread.start()
    with pytest.raises(SystemExit) as caught:
        trainer.fit(Net(), data(4))
    thread.join()
    assert time.monotonic() - signalled[0] < scaled(15)
    assert caught.value.code == 128 + signal.SIGTERM
    assert two_nodes.is_free()


@pytest.mark.slow
def test_a_worker_that_can_t_stop_is_named_and_killed(two_nodes, tmp_path, capfd):
    def never(path):
        path.touch()
        while True:
            time.sleep(60)  # goes on after a signal

    thread = signal_when(tmp_path / "begun")
    trainer = torchhal.Trainer(
        accelerator="cpu", plugins=RayEnvironment(num_workers=2, stop_timeout=5), max_epochs=8, logger=False,
        callbacks=[At(1, 2, never, tmp_path / "begun")], **QUIET,
    )  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        trainer.fit(Net(), data(4))
    thread.join()
    assert caught.value.code == 128 + signal.SIGTERM
    assert re.search(r"killed, for the signal's time was up: .*rank 1", capfd.readouterr().err)
    assert two_nodes.is_free()


@pytest.mark.slow
def test_a_signal_to_the_driver_stops_at_a_step_and_saves(two_nodes, tmp_path):
    begun = tmp_path / "begun"

    def trainer(*callbacks):
        return torchhal.Trainer(
            accelerator="cpu", plugins=RayEnvironment(num_workers=2), max_epochs=8, callbacks=list(callbacks),
            default_root_dir=f"file://{tmp_path}", logger=False, **QUIET,
        )  # fmt: skip

    thread = signal_when(begun)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        trainer(At(0, 1, Path.touch, begun), At(1, 2, hang, 3.0)).fit(Net(), data(4))
    thread.join()
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    assert two_nodes.is_free()
    (saved,) = tmp_path.rglob("interrupted-*.ckpt")
    step = int(re.search(r"step=(\d+)", saved.name)[1])
    assert 2 <= step < 48, saved
    second, model = trainer(), Net()
    second.fit(model, data(4), ckpt_path="last")
    expected, _ = plain_loop(8, 8)
    assert second.global_step == 48
    torch.testing.assert_close(model.layer.weight, expected.layer.weight)


def test_what_cant_travel_is_named(two_nodes):
    model = Net()
    model.lock = threading.Lock()
    trainer = torchhal.Trainer(accelerator="cpu", plugins=RayEnvironment(num_workers=2), logger=False, **QUIET)
    with pytest.raises(LaunchError, match=r"module.*lock.*can't be sent.*setup, configure_model"):
        trainer.fit(model, data(4))
    assert two_nodes.is_free()


def test_too_little_room_says_what_was_asked_and_what_there_is(two_nodes, capfd):
    with pytest.raises(LaunchError) as caught:
        fit(num_workers=3, resources_per_worker={"CPU": 2, "memory": 2**30}, timeout=1)
    text = str(caught.value)
    assert "no room within 1 s for 3 x CPU 2, memory 1.0 GiB, on as few nodes as possible (PACK)" in text
    assert len(re.findall(r"node [\d.]+ \(\w{8}\): CPU 2, memory", text)) == 2
    assert "free in all: CPU 4" in text and "RayEnvironment(timeout=...)" in text
    with pytest.raises(LaunchError, match=r"3 x CPU 1, each on a node of its own \(STRICT_SPREAD\)"):
        fit(num_workers=3, placement="STRICT_SPREAD", timeout=0)
    with pytest.raises(LaunchError, match="1 x CPU 3 on one node"):
        torchhal.Trainer(
            accelerator="cpu", strategy="ddp", devices=3, plugins=RayEnvironment(timeout=0), logger=False, **QUIET
        ).fit(Net(), data(4))
    assert two_nodes.is_free()


def test_both_ways_to_say_the_number_contradict_each_other():
    with pytest.raises(ConfigurationError, match=r"given twice: num_workers=4 \(RayEnvironment\), and 2 device\(s\)"):
        torchhal.Trainer(accelerator="cpu", strategy="ddp", devices=2, plugins=RayEnvironment(num_workers=4))
