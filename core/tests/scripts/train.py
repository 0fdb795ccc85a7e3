"""A training job for the tests of several processes: what it does comes as JSON, what came of it goes to files.

    python train.py '{"out": DIR, "trainer": {...}, "misdeed": "...", ...}'

Each rank writes DIR/rank<r>.pt; a misdeed happens on rank 1 at optimizer step 3 unless "at" says otherwise.
"""

import json
import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchhal import Callback, ModelCheckpoint, Module, Trainer


def dataset(n=48):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(n))


class Net(Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.body = None if config.get("built") else self.make_body()
        if config.get("unused"):
            self.extra = nn.Linear(2, 2)
        self.seen = []
        self.losses = []
        self.ran_on = set()
        self.automatic_optimization = not config.get("by_hand")

    def make_body(self):
        torch.manual_seed(self.config.get("seed", 0))
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def configure_model(self):
        if self.body is None and self.config["built"] == "configure_model":
            self.body = self.make_body()

    def setup(self, stage):
        if self.body is None and self.config["built"] == "setup":
            self.body = self.make_body()

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if self.config.get("by_hand"):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = F.cross_entropy(self.body(x), y)
            loss.backward() if self.config["by_hand"] == "raw" else self.manual_backward(loss)
            optimizer.step()
            return
        self.seen.append(index.tolist())
        misbehave(self.config, self, "step")
        loss = F.cross_entropy(self.body(x), y)
        if self.config.get("unused") == "on_rank_1" and self.global_rank != 1:
            loss = loss + self.extra(self.body(x)).mean()
        self.losses.append(loss.detach().cpu())
        self.ran_on = {str(parameter.device) for parameter in self.parameters()}
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        if self.config.get("misdeed") == "log_on_rank_zero" and self.global_rank == 0:
            self.log("lonely", loss, on_step=True, sync_dist=True)
        if self.global_rank in self.config.get("skips", {}).get(str(batch_idx), []):
            return None
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, index = batch
        misbehave(self.config, self, "validation")
        self.seen.append(("val", *index.tolist()))
        self.log("val_loss", F.cross_entropy(self.body(x), y))
        if self.config.get("val_sync"):
            self.log("val_step", float(len(y)), on_step=True, on_epoch=False, sync_dist=True)
        self.log("count", float(len(y)), reduce_fx="sum")

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[2]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **{"lr": 0.1, **of_rank_1(self.config, "optimizer")})


def of_rank_1(config, name):
    """What only rank 1 is given."""
    return config.get("of_rank_1", {}).get(name, {}) if os.environ.get("RANK") == "1" else {}


def misbehave(config, module, where):
    if config.get("where", "step") != where or module.global_rank not in config.get("ranks", [1]):
        return
    if module.trainer.sanity_checking or module.global_step != config.get("at", 3):
        return
    misdeed = config.get("misdeed")
    if misdeed == "raise":
        raise ZeroDivisionError("the model of rank 1 is broken")
    if misdeed == "exit":
        sys.exit(7)
    if misdeed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if misdeed == "hang":
        time.sleep(600)
    if misdeed == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if misdeed == "sigterm_group":
        signal_the_group("TERM")
    if misdeed == "sigint_group":
        signal_the_group("INT")
    if misdeed == "stop_alone":
        module.trainer.should_stop = True


def signal_the_group(name):
    """As a scheduler or a terminal does it: from outside the group."""
    subprocess.run(["kill", f"-{name}", "--", f"-{os.getpgid(0)}"], start_new_session=True, check=True)


class SlowDown(Callback):
    def on_train_batch_end(self, *args):
        time.sleep(0.02)


class OneMore(Dataset):
    """A rank-dependent length."""

    def __init__(self, rank):
        self.n = 48 + 8 * rank

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.zeros(6), 0, index


class Unsized:
    def __init__(self, rank, batches):
        self.rank, self.batches = rank, batches

    def __iter__(self):
        for index in range(self.batches + self.rank):
            yield torch.randn(4, 6), torch.zeros(4, dtype=torch.long), torch.full((4,), index)


def main():
    config = json.loads(sys.argv[1])
    torch.manual_seed(config.get("seed", 0))
    model = Net(config)
    options = {
        "accelerator": os.environ.get("CORE_TESTS_ACCELERATOR", "cpu"), "devices": 2, "strategy": "ddp",
        "max_epochs": 3, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": config["out"],
    }  # fmt: skip
    options.update(config.get("trainer", {}), **of_rank_1(config, "trainer"))
    callbacks = []
    if options["enable_checkpointing"]:
        callbacks.append(ModelCheckpoint(dirpath=os.path.join(config["out"], "ckpt")))
    if config.get("slow"):
        callbacks.append(SlowDown())
    if "collective_timeout" in config:
        from datetime import timedelta

        from torchhal.strategies import DDPStrategy

        options["strategy"] = DDPStrategy(timeout=timedelta(seconds=config["collective_timeout"]))
    trainer = Trainer(callbacks=callbacks, **options)
    rank = int(os.environ.get("RANK", "0"))
    batch_size = config.get("batch_size", 8)
    data = DataLoader(dataset(), batch_size, shuffle=config.get("shuffle", False), num_workers=config.get("workers", 0))
    if config.get("loader") == "one_more":
        data = DataLoader(OneMore(rank), 8)
        trainer.use_distributed_sampler = False
    elif config.get("loader") == "unsized":
        data = Unsized(rank, 5)
    val = DataLoader(dataset(config.get("val", 21)), 4, num_workers=config.get("workers", 0))
    trainer.fit(model, data, val, ckpt_path=config.get("ckpt_path"))
    outcome = {
        "state": model.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "seen": model.seen,
        "losses": model.losses,
        "ran_on": model.ran_on,
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "best": trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback else "",
    }
    if config.get("evaluate"):
        outcome["validate"] = trainer.validate(model, val, verbose=False)
        outcome["predict"] = torch.cat(trainer.predict(model, val))
        if config.get("save_after"):
            trainer.save_checkpoint(config["save_after"])
    torch.save(outcome, os.path.join(config["out"], f"rank{trainer.global_rank}.pt"))
    if config.get("after") == "one_device":
        Trainer(**{**options, "devices": 1, "strategy": "auto"}).validate(model, val)
    if config.get("after") == "raise" and trainer.global_rank == 1:
        raise ZeroDivisionError("after the fit")


if __name__ == "__main__":
    main()
