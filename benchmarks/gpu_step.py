"""A transformer of 100 M parameters in bf16 on one GPU: a step of the Trainer as a ratio to the same raw loop.

    python benchmarks/gpu_step.py [--steps 50] [--rounds 5]

Both read the same loader; the raw loop copies its batches as the field does, with pinned memory and non_blocking=True.
Each round times both, one after the other; the median of the rounds' ratios counts. The bound is 1.02. A third time is
that of the Trainer without the side stream, its batches copied in the queue of the computation; the batches are small
here, so expect little: ``--wide 200`` gives each token 200 numbers more to bring. Without a GPU there is nothing to
measure, and it says so.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from torchhal import Callback, Module, Trainer
from torchhal.accelerators import Accelerator
from torchhal_gpu.cuda import GPUAccelerator

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 16_384, 768, 12, 512, 16
WARM = 5
BOUND = 1.02


class Tokens(Dataset):
    """Sentences; with ``wide``, each beside that many numbers a token, which only travel."""

    def __init__(self, batches, wide):
        self.tokens = torch.randint(VOCABULARY, (batches * BATCH, LENGTH + 1))
        self.ballast = torch.zeros(LENGTH, wide)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], self.ballast


class InOneQueue(GPUAccelerator):
    """Batches copied on the stream of the computation."""

    batch_to_device = Accelerator.batch_to_device


class Transformer(Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens):
        return F.linear(self.layers(self.embedding(tokens), mask=self.mask, is_causal=True), self.embedding.weight)

    def training_step(self, batch, batch_idx):
        batch, _ = batch
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


def loader(steps, wide):
    return DataLoader(Tokens(steps + WARM, wide), BATCH, pin_memory=True)


def raw(steps, wide):
    device = torch.device("cuda", 0)
    model = Transformer().to(device)
    optimizer = model.configure_optimizers()
    for step, batch in enumerate(loader(steps, wide)):
        if step == WARM:
            torch.cuda.synchronize()
            start = time.perf_counter()
        batch = [tensor.to(device, non_blocking=True) for tensor in batch]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.training_step(batch, step)
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


class Timer(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == WARM:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

    def on_train_end(self, trainer, module):
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start


def trainer(steps, wide, accelerator):
    timer = Timer()
    Trainer(
        accelerator=accelerator,
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Transformer(), loader(steps, wide))
    return timer.seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wide", type=int, default=0)
    arguments = parser.parse_args()
    available = GPUAccelerator.availability()
    if not available:
        print(f"gpu_step: nothing to measure here: {available.reason}")
        return
    parameters = sum(p.numel() for p in Transformer().parameters())
    size = arguments.steps, arguments.wide
    rounds = [(raw(*size), trainer(*size, "gpu"), trainer(*size, InOneQueue)) for _ in range(arguments.rounds)]
    ratios = [ours / theirs for theirs, ours, _ in rounds]
    print(
        f"gpu_step: {parameters / 1e6:.0f} M parameters on {torch.cuda.get_device_name()}: raw "
        f"{statistics.median(theirs for theirs, _, _ in rounds) * 1e3:.1f} ms, Trainer/raw "
        f"{statistics.median(ratios):.3f} (rounds {', '.join(f'{ratio:.3f}' for ratio in ratios)}); bound {BOUND}"
    )
    beside = statistics.median(ours / queued for _, ours, queued in rounds)
    print(f"gpu_step: batches on a stream of their own / in the queue of the computation {beside:.3f}")
    if statistics.median(ratios) > BOUND:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
