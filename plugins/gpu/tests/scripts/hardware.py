"""Checks of what trains on a device, in one process: torch has backward passes for one kind of accelerator in each.

    python hardware.py gpu|sim RESULTS FOLDER

writes ``{check: traceback or ""}``. Each function whose name begins with ``check_`` is one; those that begin with
``gpu_check_`` need a GPU. The simulated device runs the others, so that none of their lines first runs on a GPU.
"""

import gc
import json
import sys
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchhal import Module, Trainer, seed_everything
from torchhal_gpu._stream_transfer import SideStreamAccelerator
from torchhal_gpu.cuda import GPUAccelerator
from torchhal_gpu.tf32 import TF32Precision

HARDWARE, RESULTS, FOLDER = sys.argv[1:]

if HARDWARE == "gpu":
    Hardware = GPUAccelerator
else:
    from torchhal_simulator.accelerator import SimAccelerator

    class Hardware(SideStreamAccelerator, SimAccelerator):
        pass


Hardware.require_available()
DEVICE = torch.device(Hardware.device_type, 0)
SIZE = 2048 if HARDWARE == "gpu" else 64


class Net(Module):
    def __init__(self, dropout=0.0, optimizer="adamw"):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(dropout))
        self.head = nn.Linear(128, 1)
        self.kind = optimizer

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=1e-2)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(**options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(320, 32, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 32, **options)  # ten batches


def plain(dtype=None, optimizer="adamw"):
    """The loop in plain PyTorch, on the same device."""
    seed_everything(0)
    model = Net(optimizer=optimizer).to(DEVICE)
    optimizer = model.configure_optimizers()
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype is torch.float16)
    for x, y in data():
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            loss = F.mse_loss(model(x.to(DEVICE)), y.to(DEVICE))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "max_epochs": 1}  # fmt: skip
    return Trainer(**{"accelerator": Hardware(), "devices": 1, **quiet, **options})


def trained(model=None, **options):
    seed_everything(0)
    model = model or Net()
    trainer(**options).fit(model, data())
    return model


def same(model, other, tolerance=0.0):
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert mine.device.type == "cpu", name
        torch.testing.assert_close(mine.detach(), theirs.detach().cpu(), rtol=tolerance, atol=tolerance, msg=name)


def check_ten_steps_equal_the_plain_loop():
    for precision, dtype in (("32-true", None), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        same(trained(precision=precision), plain(dtype))


class Saves(Net):
    path = ""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 4 and self.path:
            self.trainer.save_checkpoint(self.path)


def check_a_resumed_run_is_equal_to_the_bit():
    """The device's random numbers, the scaler's state and the midst of a shuffled epoch included."""
    path, models = f"{FOLDER}/four.ckpt", []
    for seed, resume in ((3, None), (9, path)):
        seed_everything(seed)
        model = Saves(dropout=0.5)
        model.path = "" if resume else path
        loader = data(shuffle=True, pin_memory=HARDWARE == "gpu")
        trainer(precision="16-mixed", max_epochs=2).fit(model, loader, ckpt_path=resume)
        models.append(model)
    same(*models)


def check_nothing_stays_on_the_device():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("no such luck")
            return super().training_step(batch, batch_idx)

    accelerator = Hardware()
    trained()  # the libraries' own workspaces
    gc.collect()
    before = accelerator.memory_stats(DEVICE)["allocated"]
    model = Net()
    run = trainer()
    run.fit(model, data())
    assert all(value.device.type == "cpu" for state in run.optimizers[0].state.values() for value in state.values())
    failing = Fails()
    try:
        trainer().fit(failing, data())
    except RuntimeError as error:
        assert "no such luck" in str(error), error
    else:
        raise AssertionError("the error was lost")
    for each in (model, failing):
        assert all(parameter.device.type == "cpu" for parameter in each.parameters())
    gc.collect()  # an error's frames refer to each other
    assert accelerator.memory_stats(DEVICE)["allocated"] == before


def check_memory_is_counted_in_bytes():
    accelerator = Hardware()
    accelerator.setup_device(DEVICE)
    accelerator.reset_peak_memory_stats(DEVICE)
    before = accelerator.memory_stats(DEVICE)
    tensor = torch.empty(1 << 24, dtype=torch.uint8, device=DEVICE)
    stats = accelerator.memory_stats(DEVICE)
    assert stats["allocated"] - before["allocated"] == 1 << 24, (before, stats)
    assert stats["allocated"] <= stats["peak"], stats
    if HARDWARE == "gpu":
        assert stats["allocated"] <= stats["reserved"] <= stats["used"] <= stats["limit"], stats
    del tensor
    accelerator.teardown()
    assert accelerator.memory_stats(DEVICE)["allocated"] == before["allocated"]


def check_a_copy_beside_the_computation_is_whole():
    """Each batch is freed while its use is still queued: the next copies must not land in its memory."""
    accelerator, weight = Hardware(), torch.randn(SIZE, SIZE, device=DEVICE)
    sums, expected = [], []
    for number in range(30):
        host = torch.full((SIZE, SIZE), float(number))
        expected.append(float(number) * SIZE * SIZE)
        batch = accelerator.batch_to_device(host, DEVICE, non_blocking=True)
        for _ in range(5):
            weight = torch.tanh(weight @ weight / SIZE)
        sums.append(batch.double().sum())
        del batch
    assert [each.item() for each in sums] == expected


def gpu_check_a_copy_does_not_wait_for_the_computation():
    accelerator, host = GPUAccelerator(), torch.ones(1 << 20).pin_memory()
    accelerator.batch_to_device(host, DEVICE, non_blocking=True)  # makes the stream
    torch.cuda.synchronize()
    computing = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # clock cycles: some seconds
    computing.record()
    batch = accelerator.batch_to_device(host, DEVICE, non_blocking=True)
    accelerator._copying[DEVICE].synchronize()
    assert not computing.query(), "the copy came after what was queued before it"
    assert batch.sum().item() == 1 << 20 and computing.query()


def gpu_check_tf32_is_on_within_the_run_only():
    if not torch.cuda.is_tf32_supported():
        return
    seen = []

    class Seeing(Net):
        def training_step(self, batch, batch_idx):
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().training_step(batch, batch_idx)

    before = torch.get_float32_matmul_precision()
    trained(Seeing(), precision=TF32Precision())
    assert set(seen) == {"tf32"} and torch.get_float32_matmul_precision() == before


def gpu_check_compiled_in_place():
    """With SGD: Adam's first step is a gradient's sign, which another order of sums may turn."""
    seed_everything(0)
    model = Net(optimizer="sgd")
    model.compile()
    trainer().fit(model, data())
    same(model, plain(optimizer="sgd"), 1e-4)


def main():
    prefixes = ("check_", "gpu_check_") if HARDWARE == "gpu" else ("check_",)
    found = {}
    for name, check in list(globals().items()):
        if not name.startswith(prefixes):
            continue
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    Path(RESULTS).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
