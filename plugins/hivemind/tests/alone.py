"""Fits of peers that are alone, one after another in this process: ``alone.py FOLDER`` leaves FOLDER/results.pt.

The process is a fresh one, as hivemind forks: a test process has threads that a fork would lose.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch
from peer import FAST, Net, batches
from processes import alive, descendants

from torchhal import Trainer
from torchhal.trainer.callbacks import Callback, ModelCheckpoint
from torchhal_hivemind.strategy import HivemindStrategy

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


def fit(model, data, *, folder=None, ckpt_path=None, strategy=None, **options):
    trainer_options = {"max_epochs": 1, **options.pop("trainer", {})}
    if strategy is None:
        strategy = HivemindStrategy(**{**FAST, "target_batch_size": 32, **options})
    callbacks = [Census()]
    if folder is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False, callbacks=callbacks,
        enable_model_summary=False, enable_checkpointing=folder is not None, **trainer_options,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt_path)
    if folder is not None:
        trainer.save_checkpoint(folder / "after.ckpt")  # needs no peers
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "step": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "left": left(),
        "epoch": getattr(strategy, "epoch", None),
    }


class Census(Callback):
    """Notes what hivemind has started."""

    seen: ClassVar[set[int]] = set()

    def on_train_start(self, trainer, module):
        self.seen.update(descendants(os.getpid()))


def _left():
    """Commands of what runs still, but for torch's own helper for shared memory, which ends with this process."""
    return [command for command in alive(Census.seen).values() if command != "torch_shm_manager"]


def left():
    """What is still there when what is ending has had the time to: a killed process is listed for a moment more."""
    deadline = time.monotonic() + 10
    while (found := _left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


class AfterTheNetwork(HivemindStrategy):
    """Begins when hivemind has heard of the network that nobody is there."""

    def _join(self):
        assert self._collaboration.tracker.fetched_global_progress_this_epoch.wait(60)
        super()._join()


class Failing(Net):
    """Its optimizer fails at the second step."""

    def configure_optimizers(self):
        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                self.steps = getattr(self, "steps", 0) + 1
                if self.steps == 3:  # the first makes the state
                    raise ArithmeticError("no second step")
                return super().step(closure)

        return Optimizer(self.parameters(), lr=0.1, momentum=0.9)


def refused(model=None, **options):
    began = time.monotonic()
    try:
        fit(model or Net(), batches(1, 24), **options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began, left()
    return None


class Unsized:
    """A batch that doesn't say how many samples it has."""

    def __init__(self, pair):
        self.pair = pair

    def __getitem__(self, index):
        return self.pair[index]


def main(folder):
    torch.set_num_threads(1)
    data = batches(1, 24)
    uneven = [(x[: 8 - index % 3], y[: 8 - index % 3]) for index, (x, y) in enumerate(data)]
    results = {"interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler}
    sharing = torch.multiprocessing.get_sharing_strategy()
    results["clipped"] = fit(Net(), data, folder=folder / "run", trainer={"gradient_clip_val": 0.05})
    results["interrupt_after"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    results["sharing"] = sharing, torch.multiprocessing.get_sharing_strategy()
    saved = str(folder / "run" / "epoch=0-step=3.ckpt")
    results["resumed"] = fit(Net(9), data, ckpt_path=saved, trainer={"gradient_clip_val": 0.05})
    late = AfterTheNetwork(**{**FAST, "target_batch_size": 32})
    results["late"] = fit(Net(9), data, ckpt_path=saved, strategy=late, trainer={"gradient_clip_val": 0.05})
    results["elsewhere"] = fit(
        Net(9), data, ckpt_path=saved, strategy="single_device", folder=folder / "elsewhere",
        trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 4},
    )  # fmt: skip
    results["returned"] = fit(
        Net(9), data, ckpt_path=str(folder / "elsewhere" / "after.ckpt"),
        trainer={"gradient_clip_val": 0.05, "max_epochs": 2},
    )  # fmt: skip
    results["accumulated"] = fit(Net(), data, trainer={"accumulate_grad_batches": 2})
    results["uneven"] = fit(Net(), uneven, target_batch_size=14)
    results["own steps"] = fit(Net(), data, averaging="state")
    dies_with_the_locks()
    results["after a kill"] = fit(Net(), data, averaging="state")
    results["bf16"] = fit(Net(), data, trainer={"precision": "bf16-mixed"})
    results["unanswered"] = refused(initial_peers=[NOBODY], join_timeout=5.0)
    results["unsized"] = refused_batch()
    results["failing"] = refused(model=Failing())
    results["seen"] = len(Census.seen)
    torch.save(results, folder / "results.pt")


def dies_with_the_locks():
    """As a process of hivemind's that is killed at a bad moment."""
    from hivemind.utils.mpfuture import MPFuture, SharedBytes

    def die():
        for lock in (SharedBytes._lock, MPFuture._update_lock):
            lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def refused_batch():
    try:
        fit(Net(), [Unsized(pair) for pair in batches(1, 4)])
    except Exception as error:
        named = type(error).__name__, str(error)
    return named, left(), fit(Net(), [Unsized(pair) for pair in batches(1, 4)], batch_size=8)["step"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
