"""One card: the checks that share a process. Run in lazy mode."""

import os
import tempfile

import torch
import torch.utils.checkpoint
from modelling import STEPS, Net, difference, loader, plain
from torch import nn

from torchhal import Trainer
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.resolve import Request, resolve
from torchhal_hpu import FP8Precision, HPUMixedPrecision, HPUSingleStrategy, HPUStats, fused

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


def trained(make=Net, **options):
    torch.manual_seed(0)
    model = make()
    trainer = Trainer(**{"accelerator": "hpu", "devices": 1, "max_epochs": 2, **QUIET, **options})
    trainer.fit(model, loader(), loader())
    return trainer, model


def raises(kind, words, function, *args, **options):
    try:
        function(*args, **options)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def parity():
    trainer, model = trained()
    assert type(trainer.strategy) is HPUSingleStrategy and trainer.strategy.alias == "hpu_single"
    assert model.device.type == "cpu" and difference(model.state_dict(), plain()) < 1e-5
    assert "MASTER_ADDR" not in os.environ and "MASTER_PORT" not in os.environ
    assert "HLS_MODULE_ID" not in os.environ, "a process alone takes any free module"


def marks():
    """After each backward, after each update, before each evaluation step, and nowhere else; by hand as well."""
    from habana_frameworks_stub import trace

    seen = []

    class Watched(Net):
        def training_step(self, batch, batch_idx):
            seen.append(("train", len(trace.marks())))
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            seen.append(("update", len(trace.marks()), trace.unmarked()))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(("end", len(trace.marks()), trace.unmarked()))

        def validation_step(self, batch, batch_idx):
            seen.append(("validate", len(trace.marks())))

    start = len(trace.marks())
    trained(Watched, max_epochs=1, accumulate_grad_batches=2, num_sanity_val_steps=0)
    count = start
    for step in range(STEPS):
        assert seen.pop(0) == ("train", count)
        count += 1  # its backward
        if step % 2:
            assert seen.pop(0) == ("update", count, 0)
            count += 1
        kind, marked, unmarked = seen.pop(0)
        assert (kind, marked) == ("end", count) and unmarked == 0
    for _ in range(STEPS):
        count += 1
        assert seen.pop(0) == ("validate", count)
    assert not seen

    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

        def on_train_end(self):
            seen.append(len(trace.marks()))

    start = len(trace.marks())
    trained(Manual, max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    assert seen == [start + 2 * STEPS]


def continued_elsewhere(make):
    """What the bridge's optimizer has saved, torch's goes on with, and the other way round."""

    class Model(Net):
        def configure_optimizers(self):
            return fused(make(self.parameters()))

    expected = plain(Model)
    with tempfile.TemporaryDirectory() as folder:
        for before, after in (("hpu", "cpu"), ("cpu", "hpu"), ("hpu", "hpu")):
            trainer, _ = trained(Model, max_epochs=1, accelerator=before)
            trainer.save_checkpoint(f"{folder}/half.ckpt")
            model = Model()
            trainer = Trainer(accelerator=after, devices=1, max_epochs=2, **QUIET)
            trainer.fit(model, loader(), ckpt_path=f"{folder}/half.ckpt")
            assert type(trainer.optimizers[0]).__name__.startswith("Fused") == (after == "hpu")
            apart = difference(model.state_dict(), expected)
            assert apart < 1e-5, (before, after, type(trainer.optimizers[0]), apart)


def fused_parts():
    from habana_frameworks.torch.hpex import optimizers

    kinds = {
        "FusedAdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-10),
        "FusedSGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        "FusedAdagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    }
    for name, make in kinds.items():

        class Model(Net):
            def configure_optimizers(self, make=make):
                optimizer = fused(make(self.parameters()))
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        class Plain(Model):
            def configure_optimizers(self):
                self.rates = torch.optim.lr_scheduler.StepLR(optimizer := super().configure_optimizers()[0][0], 1, 0.5)
                return optimizer

        strategy = HPUSingleStrategy(fused_clip_norm=True)
        trainer, model = trained(Model, strategy=strategy, gradient_clip_val=0.3, max_epochs=1)
        assert type(trainer.optimizers[0]) is getattr(optimizers, name), trainer.optimizers
        apart = difference(model.state_dict(), plain(Plain, epochs=1, clip=0.3))
        assert apart < 1e-5, (name, apart)
        continued_elsewhere(make)
    weight = nn.Parameter(torch.zeros(2, device="hpu"))
    adam = torch.optim.Adam
    assert type(fused(adam([weight]))) is optimizers.FusedAdamW
    empty = fused(torch.optim.AdamW([{"params": []}, {"params": [weight], "lr": 0.5}]))
    assert [group["lr"] for group in empty.param_groups] == [0.5]
    raises(ConfigurationError, "no weight_decay=0.1", fused, adam([weight], weight_decay=0.1))
    raises(ConfigurationError, "no fused RMSprop", fused, torch.optim.RMSprop([weight]))
    raises(ConfigurationError, "no amsgrad=True", fused, torch.optim.AdamW([weight], amsgrad=True))
    both = torch.optim.SGD([weight, nn.Parameter(torch.zeros(2))], lr=0.1)
    raises(ConfigurationError, "on cpu, hpu", fused, both)


def precisions():
    from habana_frameworks_stub import trace

    _, model = trained(precision="bf16-mixed")
    assert 1e-5 < difference(model.state_dict(), plain()) < 0.1
    assert trace.marks()
    raises(UnsupportedCombinationError, "'64-true'", Trainer, accelerator="hpu", precision=64, **QUIET)
    raises(UnsupportedCombinationError, "intel-transformer-engine", trained, precision="fp8")
    assert resolve(Request(accelerator="hpu", precision="fp8")).precision.alias == "hpu-fp8"
    os.environ["HABANA_FRAMEWORKS_STUB_DEVICE"] = "GAUDI"
    raises(UnsupportedCombinationError, "needs a Gaudi 2", trained, precision=FP8Precision())
    del os.environ["HABANA_FRAMEWORKS_STUB_DEVICE"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as ops:
        ops.write("matmul\n")
        ops.flush()
        raises(ConfigurationError, "comes too late", HPUMixedPrecision, ops.name)


def checkpoints():
    """On the host in the file, tied weights as one; and a run that is resumed ends where an unbroken one does."""

    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.decode = nn.Linear(6, 16, bias=False)
            self.decode.weight = self.body[0].weight
            self.drop = nn.Dropout(0.3)

        def forward(self, x):
            return self.head(self.drop(self.body(x) + self.decode(x)))

    with tempfile.TemporaryDirectory() as folder:
        _, whole = trained(Tied, max_epochs=4)
        trainer, _ = trained(Tied, max_epochs=2)
        path = f"{folder}/half.ckpt"
        trainer.save_checkpoint(path)
        data = torch.serialization.load(path, weights_only=True)
        state = data["state_dict"]
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        tied = state["decode.weight"], state["body.0.weight"]
        assert tied[0].untyped_storage().data_ptr() == tied[1].untyped_storage().data_ptr()
        torch.manual_seed(99)
        resumed = Tied()
        Trainer(accelerator="hpu", devices=1, max_epochs=4, **QUIET).fit(resumed, loader(), loader(), ckpt_path=path)
        assert difference(resumed.state_dict(), whole) == 0
        on_cpu = Tied()
        Trainer(accelerator="cpu", devices=1, max_epochs=4, **QUIET).fit(on_cpu, loader(), loader(), ckpt_path=path)


def statistics():
    strategy = resolve(Request(accelerator="hpu", devices=1)).build()
    strategy.setup_environment()
    accelerator, device = strategy.accelerator, strategy.root_device
    accelerator.reset_peak_memory_stats(device)
    before = accelerator.memory_stats(device)
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    stats = accelerator.memory_stats(device)
    assert stats["allocated"] - before["allocated"] == 1 << 20 and stats["peak"] >= stats["allocated"]
    assert set(accelerator.device_stats(device)) == {
        "Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees", "ActiveAllocs", "MaxAllocSize", "TotalSystemAllocs",
        "TotalSystemFrees", "TotalActiveAllocs",
    }  # fmt: skip
    accelerator.synchronize(device)
    state = accelerator.get_rng_state(device)
    first = torch.rand(3, device=device)
    accelerator.set_rng_state(state, device)
    assert torch.equal(first, torch.rand(3, device=device))
    del tensor
    strategy.teardown()
    logged = []

    class Log:
        def log_metrics(self, metrics, step=None):
            logged.append((step, metrics))

    from torchhal.trainer.loggers import Logger

    logger = type("Notes", (Log, Logger), {})()
    trained(callbacks=HPUStats(), logger=logger, log_every_n_steps=3, max_epochs=1)
    told = [(step, metrics["hpu/InUse"]) for step, metrics in logged if "hpu/InUse" in metrics]
    assert [step for step, _ in told] == [3, 6] and all(used > 0 for _, used in told)
    raises(ConfigurationError, "needs a logger", trained, callbacks=HPUStats())


def recomputation():
    """The random state is kept for activations that are computed again: it must be the device's own."""

    class Recomputed(Net):
        def forward(self, x):
            drop = lambda value: nn.functional.dropout(self.body(value), 0.5)  # noqa: E731
            return self.head(torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False))

    class Kept(Net):
        def forward(self, x):
            return self.head(nn.functional.dropout(self.body(x), 0.5))

    _, recomputed = trained(Recomputed, max_epochs=1)
    _, kept = trained(Kept, max_epochs=1)
    assert difference(recomputed.state_dict(), kept) == 0


def modules():
    """The first device is any, another one is that one; a process keeps what it has opened."""
    assert "HLS_MODULE_ID" not in os.environ
    trained(devices=[1], max_epochs=1)
    assert os.environ["HLS_MODULE_ID"] == "1"
    os.environ["HABANA_VISIBLE_MODULES"] = "4,6"
    raises(ConfigurationError, "has opened module 1 and keeps it", trained, devices=[1])
    os.environ["HABANA_VISIBLE_MODULES"] = "4"
    raises(ConfigurationError, "this process sees 1", trained, devices=[1])
    del os.environ["HABANA_VISIBLE_MODULES"]


def refusals():
    raises(ConfigurationError, "at most 2", Trainer, accelerator="hpu", devices=3)
    raises(ConfigurationError, "PT_HPU_LAZY_MODE=0", trained, strategy=HPUSingleStrategy(compile=True))
    raises(ConfigurationError, "'fused_clip_norm'", HPUSingleStrategy, fused_clip_norm="yes")
    raises(ConfigurationError, "'compile'", HPUSingleStrategy, compile="hpu_backend")
    raises(UnsupportedCombinationError, "hpu_single", Trainer, accelerator="cpu", strategy="hpu_single")
    raises(UnsupportedCombinationError, "'fork'", Trainer, accelerator="hpu", strategy="ddp_fork", devices=2)


if __name__ == "__main__":
    assert torch.device("hpu").type == "hpu"
    for check in (parity, marks, fused_parts, precisions, checkpoints, statistics, recomputation, modules, refusals):
        check()
        print(check.__name__, flush=True)
