"""Test that objects, threads and environment variables of a run are released when it ends."""

import gc
import os
import threading
import weakref

import hardware
import pytest
import torch
from full_net import Data, Net, Scored, batches, fit
from quiet_trainer import make
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Callback
from torchhal.trainer.callbacks import EarlyStopping

pytestmark = pytest.mark.usefixtures("accelerator")


@pytest.mark.slow
def test_step_output_freed_before_next():
    """The output of a step is freed before the next one."""
    alive = []

    class Big:
        """Stands for activations."""

    class Keeps(Net):
        def note(self, batch_idx):
            gc.collect()
            if alive:
                assert alive[-1]() is None, "the last step's output is still alive"
            big = Big()
            alive.append(weakref.ref(big))
            return big

        def training_step(self, batch, batch_idx):
            return {"loss": self.layer(batch).mean(), "big": self.note(batch_idx)}

        def validation_step(self, batch, batch_idx):
            return self.note(batch_idx)

        test_step = predict_step = validation_step

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert outputs["big"] is alive[-1]()

        def on_train_batch_start(self, batch, batch_idx):
            assert not alive or alive[-1]() is None

    trainer, model = fit(Keeps(), batches(3), batches(3))
    trainer.test(model, batches(3), verbose=False)
    trainer.predict(model, batches(3), return_predictions=False)
    assert len(alive) == 12


def test_previous_run_is_freed():
    """Nothing of a run is kept alive by the next one."""
    trainer, model = fit(Net(), DataLoader(TensorDataset(torch.ones(4, 1)), collate_fn=lambda rows: rows[0][0]))
    gone = weakref.ref(model)
    trainer.validate(Net(), batches(1), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(), batches())
    del model
    gc.collect()
    assert gone() is None


class Decaying(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.kept = self.optimizers()
        self.kept.zero_grad()
        self.manual_backward(self.layer(batch).pow(2).mean())
        self.kept.step()


class OwnStep(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.kept = optimizer
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Net, {}),
        (Decaying, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
        (ByHand, {}),
        (OwnStep, {}),
        (Scored, {"logger": True, "enable_checkpointing": True, "enable_progress_bar": True,
                  "enable_model_summary": True, "num_sanity_val_steps": 1}),
        (Net, {"strategy": "ddp"}),
    ],
    ids=["plain", "scheduler", "by hand", "own step", "everything on", "ddp"],
)  # fmt: skip
def test_trainer_freed_without_gc(tmp_path, kind, options):
    """A Trainer and its model are freed without a garbage collection."""
    stopping = [EarlyStopping("score", mode="max")] if kind is Scored else []
    # torch imports torch._dynamo with a process' first optimizer, and keeps the frames of who called in a cycle.
    torch.optim.SGD(Net().parameters())
    gc.collect()
    gc.disable()
    try:
        model, data = kind(), Data()
        trainer = make(*stopping, default_root_dir=tmp_path, **{"enable_checkpointing": False, **options})
        trainer.fit(model, data)
        trainer.validate(model, data, verbose=False)
        trainer.predict(model, batches())
        gone = [weakref.ref(part) for part in (trainer, model, data, trainer.optimizers[0], trainer.strategy)]
        del trainer, model, data
        assert [reference() for reference in gone] == [None] * 5
        alone = weakref.ref(make())
        assert alone() is None
    finally:
        gc.enable()


def test_a_model_outlives_its_trainer():
    model, data = Net(), Data()
    make().fit(model, data)
    with pytest.raises(RuntimeError, match="Net is not attached to a Trainer"):
        _ = model.trainer
    assert data.trainer is None and model.current_epoch == 0 and model.logger is None
    by_hand = ByHand()
    trainer = make()
    trainer.fit(by_hand, batches())
    kept = by_hand.kept
    trainer.fit_loop.max_epochs = 2
    trainer.fit(by_hand, batches())
    with pytest.raises(ReferenceError, match="this SGD belongs to a fit that is over"):
        kept.step()


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp"}, {"logger": True, "num_workers": 1}], ids=str)
def test_fit_leaves_no_threads(tmp_path, monkeypatch, options):
    """No thread and no environment variable outlives a fit."""
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    workers = options.pop("num_workers", 0)
    during = set()

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            during.update(thread.name for thread in threading.enumerate())

    # torch writes TORCHINDUCTOR_CACHE_DIR into the environment with a process' first optimizer.
    torch.optim.SGD(Net().parameters())
    threads, variables = threading.enumerate(), dict(os.environ)
    loader = DataLoader(torch.ones(4, 1), num_workers=workers)
    fit(Net(), loader, loader, Look(), default_root_dir=tmp_path, **options)
    assert "torchhal-signals" in during
    # A DataLoader tells the threads that feed its workers to end, and doesn't wait for them.
    for thread in set(threading.enumerate()) - set(threads):
        if thread.name == "QueueFeederThread":
            thread.join()
    assert threading.enumerate() == threads and dict(os.environ) == variables


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_thread_ends_despite_forked_child():
    """The signal thread ends although a forked child holds its pipe."""
    reading, writing = os.pipe()
    children = []

    class Forks(Callback):
        def on_train_start(self, trainer, module):
            pid = os.fork()
            if pid == 0:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            children.append(pid)

    threads = threading.enumerate()
    try:
        fit(Net(), None, None, Forks())
        assert threading.enumerate() == threads
    finally:
        os.close(writing)
        for pid in children:
            os.waitpid(pid, 0)
        os.close(reading)


class Wide(Net):
    """A model whose activations take as much memory as its weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)]
        self.layers = torch.nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithHook(Wide):
    def on_before_zero_grad(self, optimizer):
        assert self.layers[0][0].weight.grad is not None or self.trainer.global_step == 0


def peak_of_a_fit(model):
    device = torch.device(hardware.name(), 0)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    make(max_steps=4).fit(model, [torch.ones(128, 256)] * 4)
    return torch.accelerator.max_memory_allocated(device) - before


def peak_of_a_plain_loop():
    device = torch.device(hardware.name(), 0)
    model = Wide().to(device)
    optimizer = model.configure_optimizers()
    torch.accelerator.reset_peak_memory_stats(device)
    for _ in range(4):
        optimizer.zero_grad()
        model.training_step(torch.ones(128, 256).to(device), 0).backward()
        optimizer.step()
    return torch.accelerator.max_memory_allocated(device)


def test_gradients_of_the_last_step_do_not_lie_beside_the_activations():
    """They are cleared before the forward, unless a hook is to be called between forward and backward."""
    if hardware.name() == "cpu":
        pytest.skip("the CPU counts no memory")
    plain, early, late = peak_of_a_plain_loop(), peak_of_a_fit(Wide()), peak_of_a_fit(WithHook())
    weights = sum(parameter.nbytes for parameter in Wide().layers.parameters())
    assert early <= plain * 1.02 and late - early >= weights * 0.6
